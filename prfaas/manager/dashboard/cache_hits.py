"""Share of prompt tokens that are cached somewhere, by the fastest tier that holds them."""

from collections.abc import Callable

import numpy as np

from prfaas.index.memory.index import Index
from prfaas.index.query import MatchResult, Query

SAMPLE_SECONDS = 0.2  # A match by tier may take a millisecond, so that requests in between are left out.
MAX_SAMPLES = 18_000  # An hour.
_FIGURES = ("prompt_tokens", "memory", "ssd")


class CacheHits:
    """Samples of routed prompts. `wall_clock` is Unix time."""

    def __init__(self, index: Index, wall_clock: Callable[[], float]) -> None:
        self._index, self._wall_clock = index, wall_clock
        self._rows = np.zeros(MAX_SAMPLES, [("at", np.float64), *((name, np.int64) for name in _FIGURES)])
        self._num_samples = 0

    def note(self, query: Query, answer: MatchResult) -> None:
        """Add a prompt that `answer` belongs to, if the last sample is old enough."""
        now = self._wall_clock()
        if 0 <= now - self._rows[(self._num_samples - 1) % MAX_SAMPLES]["at"] < SAMPLE_SECONDS:
            return
        everywhere, memory = (
            max((match.usable_tokens for match in found.nodes), default=0)
            for found in (answer, self._index.match(query, tier="memory"))
        )
        self._rows[self._num_samples % MAX_SAMPLES] = (now, query.limit_tokens + 1, memory, everywhere - memory)
        self._num_samples += 1

    def figures(self, since: float, until: float) -> dict[str, int]:
        """Return the sampled tokens between two times, in all and by tier."""
        rows = self._rows[: self._num_samples]
        rows = rows[(rows["at"] >= since) & (rows["at"] < until)]
        return {name: int(rows[name].sum()) for name in _FIGURES}
