"""Length distributions of uncached and cached tokens, with exact partial expectations of any cost."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Protocol

import numpy as np

from prfaas.model.cost.curve import NEW_TOKENS, ONE, Coefficients, Cost, Curve, FloatArray, OfNewTokens

# More quantiles change no figure of a smooth distribution by a thousandth.
_NUM_QUANTILES = 2048
# Crossings of two cost curves are searched between neighbouring points of a grid of this size.
_NUM_GRID = 1024

# Maps t to E[cost; L ≤ t].
Cumulative = Callable[[float], float]
# New tokens, cached tokens and weight of each point.
Points = tuple[FloatArray, FloatArray, FloatArray]
# New and cached tokens of each request.
Tokens = tuple[FloatArray, FloatArray]


class Lengths(Protocol):
    """Distribution of L, the uncached tokens, and the cached tokens before them. Its total weight may be below 1."""

    @property
    def support(self) -> tuple[float, float]:
        """Return the least and the greatest L."""

    def cumulative(self, cost: Cost) -> Cumulative:
        """Return t ↦ E[cost; L ≤ t], exactly. At the upper end of the support it is E[cost]."""

    def expected_minimum(self, costs: Sequence[Cost]) -> float:
        """Return E[min over costs].

        Exact for traces. Closed forms miss two crossings that are nearer than a thousandth of the range.
        """

    def points(self, count: int) -> Points:
        """Return the distribution as at most about `count` weighted requests, ascending by new tokens."""

    def scaled(self, factor: float) -> Lengths:
        """Return the distribution with each request `factor` times as long, cached prefix included."""

    def draw(self, count: int, generator: np.random.Generator) -> Tokens:
        """Return new and cached tokens of `count` independent requests."""


@dataclass(frozen=True)
class LogNormal:
    """Truncated log-normal: ln L is normal (mu, sigma), L lies in [low, high], cached_ratio × L tokens are cached."""

    mu: float
    sigma: float
    low: float
    high: float
    cached_ratio: float = 0.0

    @property
    def support(self) -> tuple[float, float]:
        return self.low, self.high

    @cached_property
    def _below(self) -> float:
        return NormalDist().cdf((math.log(self.low) - self.mu) / self.sigma)

    @cached_property
    def kept_mass(self) -> float:
        """Return the share of the untruncated distribution within [low, high]."""
        return NormalDist().cdf((math.log(self.high) - self.mu) / self.sigma) - self._below

    def cumulative(self, cost: Cost) -> Cumulative:
        spans = [
            (max(start, self.low), min(end, self.high), piece)
            for start, end, piece in cost.along(self.cached_ratio).spans()
            if start < self.high and end > self.low
        ]
        starts = [start for start, _, _ in spans]
        antiderivatives = [self._antiderivative(piece) for _, _, piece in spans]
        before = [0.0]
        for (start, end, _), integral in zip(spans, antiderivatives, strict=True):
            before.append(before[-1] + integral(end) - integral(start))
        offsets = [
            total - integral(start) for total, integral, start in zip(before, antiderivatives, starts, strict=False)
        ]

        def partial(threshold: float) -> float:
            if threshold <= self.low:
                return 0.0
            if threshold >= self.high:
                return before[-1]
            index = bisect.bisect_right(starts, threshold) - 1
            return offsets[index] + antiderivatives[index](threshold)

        return partial

    def _antiderivative(self, piece: Coefficients) -> Cumulative:
        """Return x ↦ Σ c_k E[L^k; L ≤ x] of the untruncated distribution over the truncated mass.

        The k-th partial moment of a log-normal is exp(kμ + k²σ²/2) Φ((ln x − μ)/σ − kσ).
        """
        mu, sigma, mass = self.mu, self.sigma, self.kept_mass
        half_root, scale = math.sqrt(0.5), 0.5 / mass
        terms = [
            (scale * c * math.exp(k * mu + 0.5 * (k * sigma) ** 2), k * sigma) for k, c in enumerate(piece) if c != 0.0
        ]

        def integral(x: float) -> float:
            z = (math.log(x) - mu) / sigma
            return sum(factor * math.erfc((shift - z) * half_root) for factor, shift in terms)

        return integral

    def expected_minimum(self, costs: Sequence[Cost]) -> float:
        curves = [cost.along(self.cached_ratio) for cost in costs]
        grid = np.geomspace(self.low, self.high, _NUM_GRID)
        least = np.argmin([curve.many(grid) for curve in curves], axis=0)
        changes = np.flatnonzero(np.diff(least))
        crossings = [
            _crossing(curves[least[i]], curves[least[i + 1]], float(grid[i]), float(grid[i + 1])) for i in changes
        ]
        edges = [self.low, *crossings, self.high]
        choices = [int(least[0]), *(int(least[i + 1]) for i in changes)]
        partial = {choice: self.cumulative(OfNewTokens(curves[choice])) for choice in set(choices)}
        return sum(
            partial[c](end) - partial[c](start) for c, start, end in zip(choices, edges[:-1], edges[1:], strict=True)
        )

    def points(self, count: int) -> Points:
        count = min(count, _NUM_QUANTILES)
        shares = self._below + self.kept_mass * (np.arange(count) + 0.5) / count
        inverse = NormalDist(self.mu, self.sigma).inv_cdf
        new = np.clip(np.exp([inverse(share) for share in shares]), self.low, self.high)
        return new, new * self.cached_ratio, np.full(count, 1.0 / count)

    def scaled(self, factor: float) -> LogNormal:
        return replace(self, mu=self.mu + math.log(factor), low=self.low * factor, high=self.high * factor)

    def draw(self, count: int, generator: np.random.Generator) -> Tokens:
        """Draw again whatever falls outside [low, high]."""
        new: FloatArray = np.exp(generator.normal(self.mu, self.sigma, count))
        outside = np.flatnonzero((new < self.low) | (new > self.high))
        while len(outside):
            new[outside] = np.exp(generator.normal(self.mu, self.sigma, len(outside)))
            outside = outside[(new[outside] < self.low) | (new[outside] > self.high)]
        return new, new * self.cached_ratio


def _crossing(before: Curve, after: Curve, low: float, high: float) -> float:
    """Return the length between `low` and `high` from which `after` is the lesser curve."""
    for _ in range(40):
        middle = 0.5 * (low + high)
        if before(middle) <= after(middle):
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


class Empirical:
    """Requests of a trace, each with uncached and cached tokens."""

    def __init__(self, new: Sequence[float] | FloatArray, cached: Sequence[float] | FloatArray | None = None) -> None:
        unsorted = np.asarray(new, dtype=float)
        order = np.argsort(unsorted, kind="stable")
        self._new = unsorted[order]
        self._cached = np.zeros_like(self._new) if cached is None else np.asarray(cached, dtype=float)[order]

    @property
    def support(self) -> tuple[float, float]:
        return float(self._new[0]), float(self._new[-1])

    def cumulative(self, cost: Cost) -> Cumulative:
        sums = np.concatenate(([0.0], np.cumsum(cost.at(self._new, self._cached)) / len(self._new)))
        new = self._new

        def partial(threshold: float) -> float:
            return float(sums[new.searchsorted(threshold, side="right")])

        return partial

    def expected_minimum(self, costs: Sequence[Cost]) -> float:
        return float(np.minimum.reduce([cost.at(self._new, self._cached) for cost in costs]).mean())

    @property
    def requests(self) -> Tokens:
        """Return new and cached tokens of each request, ascending by new tokens."""
        return self._new, self._cached

    def points(self, count: int) -> Points:
        size = min(len(self._new), count)
        chosen = ((np.arange(size) + 0.5) * len(self._new) / size).astype(int)
        return self._new[chosen], self._cached[chosen], np.full(size, 1.0 / size)

    def scaled(self, factor: float) -> Empirical:
        return Empirical(self._new * factor, self._cached * factor)

    def draw(self, count: int, generator: np.random.Generator) -> Tokens:
        chosen = generator.integers(0, len(self._new), count)
        return self._new[chosen], self._cached[chosen]


@dataclass(frozen=True)
class Mixture:
    """Several distributions with weights that sum to at most 1."""

    parts: tuple[tuple[float, Lengths], ...]

    @property
    def support(self) -> tuple[float, float]:
        lows, highs = zip(*(lengths.support for _, lengths in self.parts), strict=True)
        return min(lows), max(highs)

    def cumulative(self, cost: Cost) -> Cumulative:
        parts = [(weight, lengths.cumulative(cost)) for weight, lengths in self.parts]
        if len(parts) == 1 and parts[0][0] == 1.0:
            return parts[0][1]
        return lambda threshold: sum(weight * partial(threshold) for weight, partial in parts)

    def expected_minimum(self, costs: Sequence[Cost]) -> float:
        return sum(weight * lengths.expected_minimum(costs) for weight, lengths in self.parts)

    def points(self, count: int) -> Points:
        arrays = [(weight, lengths.points(count)) for weight, lengths in self.parts]
        new = np.concatenate([points[0] for _, points in arrays])
        cached = np.concatenate([points[1] for _, points in arrays])
        weights = np.concatenate([weight * points[2] for weight, points in arrays])
        order = np.argsort(new, kind="stable")
        return new[order], cached[order], weights[order]

    def scaled(self, factor: float) -> Mixture:
        return Mixture(tuple((weight, lengths.scaled(factor)) for weight, lengths in self.parts))

    def draw(self, count: int, generator: np.random.Generator) -> Tokens:
        weights = np.array([weight for weight, _ in self.parts])
        part = generator.choice(len(weights), count, p=weights / weights.sum())
        new, cached = np.empty(count), np.empty(count)
        for index, (_, lengths) in enumerate(self.parts):
            chosen = np.flatnonzero(part == index)
            new[chosen], cached[chosen] = lengths.draw(len(chosen), generator)
        return new, cached


def expectation(lengths: Lengths, cost: Cost) -> float:
    """Return E[cost] over the whole distribution, not divided by its weight."""
    return lengths.cumulative(cost)(lengths.support[1])


def mean_tokens(lengths: Lengths) -> float:
    """Return E[L] in uncached tokens."""
    return expectation(lengths, NEW_TOKENS) / expectation(lengths, ONE)
