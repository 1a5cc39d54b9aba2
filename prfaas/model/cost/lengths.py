"""Length distributions of uncached and cached tokens, with partial expectations of any cost."""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from prfaas.model.cost.curve import Cost, FloatArray, new_tokens

# Lengths that represent a log-normal distribution. More change no figure by a hundred-thousandth.
_NUM_BINS = 1 << 14

# Maps t to E[cost; L ≤ t].
Cumulative = Callable[[float], float]
# New and cached tokens of each request.
Tokens = tuple[FloatArray, FloatArray]


class Lengths:
    """Distribution of L, the uncached tokens, and the cached tokens before them: the requests of a trace, or weighted ones."""

    def __init__(
        self,
        new: Sequence[float] | FloatArray,
        cached: Sequence[float] | FloatArray | None = None,
        weights: FloatArray | None = None,
    ) -> None:
        unsorted = np.asarray(new, dtype=float)
        order = np.argsort(unsorted, kind="stable")
        self._new = unsorted[order]
        self._cached = np.zeros_like(self._new) if cached is None else np.asarray(cached, dtype=float)[order]
        self._weights = np.ones_like(self._new) if weights is None else weights[order]
        self._below = np.cumsum(self._weights)

    @property
    def support(self) -> tuple[float, float]:
        """Return the least and the greatest L."""
        return float(self._new[0]), float(self._new[-1])

    def cumulative(self, cost: Cost) -> Cumulative:
        """Return t ↦ E[cost; L ≤ t]. At the upper end of the support it is E[cost]."""
        costs = cost(self._new, self._cached) * self._weights
        sums = np.concatenate(([0.0], np.cumsum(costs) / self._below[-1]))
        new = self._new

        def partial(threshold: float) -> float:
            return float(sums[new.searchsorted(threshold, side="right")])

        return partial

    def expected_minimum(self, costs: Sequence[Cost]) -> float:
        """Return E[min over costs]."""
        least = np.minimum.reduce([cost(self._new, self._cached) for cost in costs])
        return float(least @ self._weights / self._below[-1])

    @property
    def requests(self) -> Tokens:
        """Return new and cached tokens of each request, ascending by new tokens."""
        return self._new, self._cached

    def points(self, count: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return new tokens, cached tokens and weights of at most `count` requests, ascending by new tokens."""
        if len(self._new) <= count:
            return self._new, self._cached, self._weights / self._below[-1]
        chosen = self._at((np.arange(count) + 0.5) / count)
        return self._new[chosen], self._cached[chosen], np.full(count, 1.0 / count)

    def draw(self, count: int, generator: np.random.Generator) -> Tokens:
        """Return new and cached tokens of `count` independent requests."""
        chosen = self._at(generator.random(count))
        return self._new[chosen], self._cached[chosen]

    def _at(self, quantiles: FloatArray) -> NDArray[np.int64]:
        """Return the indices of the requests at these quantiles in [0, 1)."""
        indices: NDArray[np.int64] = self._below.searchsorted(quantiles * self._below[-1], side="right")
        return indices.clip(max=len(self._new) - 1)


def log_normal(mu: float, sigma: float, low: float, high: float, *, cached_ratio: float = 0.0) -> Lengths:
    """Return a truncated log-normal: ln L is normal (mu, sigma), L lies in [low, high], cached_ratio × L tokens are cached.

    Raises:
        ValueError: almost nothing of the distribution lies in [low, high].
    """
    edges = np.linspace(math.log(low), math.log(high), _NUM_BINS + 1)
    weights = np.diff([NormalDist(mu, sigma).cdf(edge) for edge in edges.tolist()])
    if weights.sum() < 1e-6:
        raise ValueError("almost no length falls between the least and the greatest")
    new = np.exp((edges[:-1] + edges[1:]) / 2)
    return Lengths(new, new * cached_ratio, weights)


def mixture(parts: Sequence[tuple[float, Lengths]]) -> Lengths:
    """Return several distributions with their weights as one."""
    points = [(weight, *lengths.points(len(lengths.requests[0]))) for weight, lengths in parts]
    new, cached = (np.concatenate([point[column] for point in points]) for column in (1, 2))
    return Lengths(new, cached, np.concatenate([weight * weights for weight, _, _, weights in points]))


def expectation(lengths: Lengths, cost: Cost) -> float:
    """Return E[cost] over the whole distribution."""
    return lengths.cumulative(cost)(lengths.support[1])


def mean_tokens(lengths: Lengths) -> float:
    """Return E[L] in uncached tokens."""
    return expectation(lengths, new_tokens)
