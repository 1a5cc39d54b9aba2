"""Share of prompt tokens that are cached somewhere, by the fastest tier that holds them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from prfaas.index.memory.index import Index
from prfaas.index.query import MatchResult, Query

SAMPLE_SECONDS = 0.2  # A match by tier may take a millisecond, so that requests in between are left out.
MAX_SAMPLES = 18_000  # An hour.


class _Sample(NamedTuple):
    at: float
    prompt_tokens: int
    memory: int
    ssd: int


class CacheHits:
    """Samples of routed prompts. `wall_clock` is Unix time."""

    def __init__(self, index: Index, wall_clock: Callable[[], float]) -> None:
        self._index, self._wall_clock = index, wall_clock
        self._samples: deque[_Sample] = deque(maxlen=MAX_SAMPLES)

    def note(self, query: Query, answer: MatchResult) -> None:
        """Add a prompt that `answer` belongs to, if the last sample is old enough."""
        now = self._wall_clock()
        if self._samples and 0 <= now - self._samples[-1].at < SAMPLE_SECONDS:
            return
        everywhere, memory = (
            max((match.usable_tokens for match in found.nodes), default=0)
            for found in (answer, self._index.match(query, tier="memory"))
        )
        self._samples.append(_Sample(now, query.limit_tokens + 1, memory, everywhere - memory))

    def figures(self, since: float, until: float) -> dict[str, Any]:
        """Return the sampled tokens between two times, in all and by tier."""
        found = [sample for sample in self._samples if since <= sample.at < until]
        return {name: sum(getattr(sample, name) for sample in found) for name in _Sample._fields[1:]}
