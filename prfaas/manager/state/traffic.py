"""Traffic of late: arrivals and request lengths for the planner, and hit rates of prefixes for rebalancing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS
from prfaas.scheduler.rebalance import PrefixKey
from prfaas.types import BlockHash, Prefix

MAX_REQUESTS = 4096
MAX_OUTPUT_TOKENS = 32_768  # Clients state any limit, and answers end earlier.
MIN_WINDOW_SECONDS = 30.0
MIN_REQUESTS = 50  # Fewer do not show a distribution.


@dataclass(frozen=True)
class RequestSample:
    """Lengths of one request: uncached and cached tokens at the decode node, and the stated answer limit or 0."""

    at: float
    new_tokens: int
    cached_tokens: int
    max_output_tokens: int


def likely_output_tokens(requests: Iterable[RequestSample]) -> float | None:
    """Return the median of the stated answer limits, or None. The median ignores a few absurd limits."""
    stated = [min(request.max_output_tokens, MAX_OUTPUT_TOKENS) for request in requests if request.max_output_tokens]
    return median(stated) if stated else None


class Traffic:
    """Latest requests. Times are monotonic seconds."""

    def __init__(self, *, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._seen: deque[RequestSample] = deque(maxlen=MAX_REQUESTS)
        self.num_requests = 0  # Since the start.
        self._reported: deque[tuple[int, int]] = deque()  # Number of reported requests by second.
        self._reported_from = math.inf  # Time of the first report.

    def note(self, seen: RequestSample) -> None:
        self.num_requests += 1
        self._seen.append(seen)

    def lately(self, now: float) -> list[RequestSample]:
        """Return the requests of the window, oldest first, or nothing while there are fewer than `MIN_REQUESTS`."""
        requests = self.within(self._window_seconds, now)
        return requests if len(requests) >= MIN_REQUESTS else []

    def within(self, seconds: float, now: float) -> list[RequestSample]:
        """Return the requests of the last `seconds`, oldest first, at most `MAX_REQUESTS`."""
        return [request for request in self._seen if request.at > now - seconds]

    def seen_ratio(self, now: float) -> float:
        """Return the share of the reported requests that were noted here; 1 while unknown."""
        reported = self.per_second(now) * min(now - self._reported_from, self._window_seconds)
        return min(1.0, len(self.within(self._window_seconds, now)) / reported) if reported else 1.0

    def note_reports(self, num_requests: int, now: float) -> None:
        """Count requests that routers report, those that a router decided alone included."""
        self._reported_from = min(self._reported_from, now)
        if self._reported and self._reported[-1][0] == int(now):
            num_requests += self._reported.pop()[1]
        self._reported.append((int(now), num_requests))

    def per_second(self, now: float) -> float:
        """Return reported requests per second over the window; 0 while unknown, at first for `MIN_WINDOW_SECONDS`."""
        seconds = min(now - self._reported_from, self._window_seconds)
        while self._reported and self._reported[0][0] <= now - self._window_seconds:
            self._reported.popleft()
        return sum(count for _, count in self._reported) / seconds if seconds >= MIN_WINDOW_SECONDS else 0.0


MEMORY_SECONDS = 10.0  # The weight of a hit falls to 1/e after so many seconds.
MAX_PREFIXES = 1024  # With 100,000 tokens each, 100 MB of hashes; the coldest are dropped.
MIN_TOKENS = 64  # Computing shorter prefixes is faster than copying them.


@dataclass
class _Hits:
    prefix: Prefix
    weight: float  # Decayed hits at time `at`.
    at: float


class Popularity:
    """Decaying hit counts of prefixes. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._hits: dict[PrefixKey, _Hits] = {}

    def __len__(self) -> int:
        return len(self._hits)

    def hit(
        self,
        model: str,
        units: bytes,
        num_tokens: int,
        *,
        checkpoints: Sequence[tuple[int, BlockHash]],
        now: float,
    ) -> None:
        """Count a prompt whose first `num_tokens` tokens are cached at the best node."""
        end_hash = _hash_at(units, num_tokens, checkpoints)
        if num_tokens < MIN_TOKENS or end_hash is None:
            return
        entry = self._hits.get((model, end_hash))
        if entry is not None:
            entry.weight, entry.at = _faded(entry, now) + 1.0, now
            return
        if len(self._hits) >= MAX_PREFIXES:
            self._forget_half(now)
        prefix_units = units[: num_tokens // HASH_UNIT_TOKENS * HASH_BYTES]
        self._hits[model, end_hash] = _Hits(Prefix(model, prefix_units, num_tokens, end_hash), 1.0, now)

    def _forget_half(self, now: float) -> None:
        """Drop the colder half at once: to search for the coldest prefix at each hit would cost more."""
        kept = sorted(self._hits, key=lambda key: -_faded(self._hits[key], now))[: MAX_PREFIXES // 2]
        self._hits = {key: self._hits[key] for key in kept}

    def hottest(self, num_prefixes: int, min_hits_per_second: float, *, now: float) -> list[tuple[Prefix, float]]:
        """Return the prefixes with the highest hit rates of at least `min_hits_per_second`, with their rates."""
        rates = [(hit.prefix, _faded(hit, now) / MEMORY_SECONDS) for hit in self._hits.values()]
        rates = [rate for rate in rates if rate[1] >= min_hits_per_second]
        return sorted(rates, key=lambda rate: -rate[1])[:num_prefixes]

    def forget_below(self, hits_per_second: float, *, now: float) -> None:
        """Drop the prefixes with a lower hit rate."""
        for key in [key for key, hits in self._hits.items() if _faded(hits, now) / MEMORY_SECONDS < hits_per_second]:
            del self._hits[key]


def _faded(hits: _Hits, now: float) -> float:
    return hits.weight * math.exp(-max(0.0, now - hits.at) / MEMORY_SECONDS)


def _hash_at(units: bytes, num_tokens: int, checkpoints: Sequence[tuple[int, BlockHash]]) -> BlockHash | None:
    """Return the hash of the first `num_tokens` tokens, if the query contained it."""
    num_units, odd = divmod(num_tokens, HASH_UNIT_TOKENS)
    if not odd:
        return BlockHash(units[(num_units - 1) * HASH_BYTES : num_units * HASH_BYTES]) or None
    return next((state_hash for length, state_hash in checkpoints if length == num_tokens), None)
