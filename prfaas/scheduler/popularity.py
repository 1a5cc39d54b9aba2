"""Hit rates of prefixes of late, for rebalancing. Pure: callers pass the time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS
from prfaas.scheduler.rebalance import PrefixKey
from prfaas.types import BlockHash, Prefix

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
        self, model: str, units: bytes, num_tokens: int, *, checkpoints: Sequence[tuple[int, BlockHash]], now: float
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
