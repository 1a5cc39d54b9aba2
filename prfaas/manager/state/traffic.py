"""The lengths of the requests that were routed lately, as the solver takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp
from statistics import median

from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS
from prfaas.scheduler.rebalance import PrefixKey
from prfaas.types import BlockHash, Prefix

MAX_REQUESTS = 4096
MAX_OUTPUT_TOKENS = 32_768  # what a limit counts for at most: clients state any number, and answers end before
MIN_REQUESTS = 50  # fewer say too little of a distribution


@dataclass(frozen=True)
class RequestSample:
    """One request: what of its prompt the decode node lacked and held, and its answer's limit (0: none stated)."""

    at: float
    new_tokens: int
    cached_tokens: int
    max_output_tokens: int


def likely_output_tokens(requests: Iterable[RequestSample]) -> float | None:
    """The median of the answers' limits, so that a few clients with absurd ones do not count; None where nobody stated one."""
    stated = [min(request.max_output_tokens, MAX_OUTPUT_TOKENS) for request in requests if request.max_output_tokens]
    return median(stated) if stated else None


class Traffic:
    """The latest requests. Times are seconds on a clock that only goes forward."""

    def __init__(self, *, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._seen: deque[RequestSample] = deque(maxlen=MAX_REQUESTS)
        self.num_requests = 0  # since the start

    def note(self, seen: RequestSample) -> None:
        self.num_requests += 1
        self._seen.append(seen)

    def lately(self, now: float) -> list[RequestSample]:
        """Those of the window, oldest first; nothing while they are too few to say anything."""
        while self._seen and self._seen[0].at <= now - self._window_seconds:
            self._seen.popleft()
        return list(self._seen) if len(self._seen) >= MIN_REQUESTS else []

    def per_second(self, now: float) -> float:
        """Arrivals per second over the window, or over as much of it as the requests kept here span."""
        lately = self.lately(now)
        return len(lately) / max(now - lately[0].at, 1.0) if lately else 0.0


MEMORY_SECONDS = 10.0  # after so long a hit counts 1/e
MAX_PREFIXES = 1024  # at 100,000 tokens 100 MB of hashes; the least asked for goes first
MIN_TOKENS = 64  # shorter ones are computed faster than they are copied


@dataclass
class _Hits:
    prefix: Prefix
    weight: float  # hits as of `at`, faded
    at: float


class Popularity:
    """Counts hits. Times are seconds on a clock that only goes forward."""

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
        """Somebody asked for a prompt of which `num_tokens` tokens are cached at the best place."""
        end_hash = _hash_at(units, num_tokens, checkpoints)
        if num_tokens < MIN_TOKENS or end_hash is None:
            return
        known = self._hits.get((model, end_hash))
        if known is not None:
            known.weight, known.at = _faded(known, now) + 1.0, now
            return
        if len(self._hits) >= MAX_PREFIXES:
            self._forget_half(now)
        of_units = units[: num_tokens // HASH_UNIT_TOKENS * HASH_BYTES]
        self._hits[model, end_hash] = _Hits(Prefix(model, of_units, num_tokens, end_hash), 1.0, now)

    def _forget_half(self, now: float) -> None:
        """Make room for as many again: at once, since to look for the least of them at each hit would cost more."""
        kept = sorted(self._hits, key=lambda key: -_faded(self._hits[key], now))[: MAX_PREFIXES // 2]
        self._hits = {key: self._hits[key] for key in kept}

    def hottest(self, num_prefixes: int, least_hits_per_second: float, *, now: float) -> list[tuple[Prefix, float]]:
        """The prefixes that were asked for most of late and at least so often, with their hits per second."""
        rates = [(hit.prefix, _faded(hit, now) / MEMORY_SECONDS) for hit in self._hits.values()]
        rates = [rate for rate in rates if rate[1] >= least_hits_per_second]
        return sorted(rates, key=lambda its: -its[1])[:num_prefixes]

    def forget_below(self, hits_per_second: float, *, now: float) -> None:
        """Drop what hardly anybody asks for."""
        for key in [key for key, its in self._hits.items() if _faded(its, now) / MEMORY_SECONDS < hits_per_second]:
            del self._hits[key]


def _faded(its: _Hits, now: float) -> float:
    return its.weight * exp(-max(0.0, now - its.at) / MEMORY_SECONDS)


def _hash_at(units: bytes, num_tokens: int, checkpoints: Sequence[tuple[int, BlockHash]]) -> BlockHash | None:
    """The hash of the first `num_tokens` tokens, when the question gave it."""
    num_units, odd = divmod(num_tokens, HASH_UNIT_TOKENS)
    if not odd:
        return BlockHash(units[(num_units - 1) * HASH_BYTES : num_units * HASH_BYTES]) or None
    return next((its for length, its in checkpoints if length == num_tokens), None)
