"""Distributions of a request's uncached and cached tokens, with exact partial expectations of any cost."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Protocol

import numpy as np

from prfaas.model.cost.curve import NEW_TOKENS, ONE, Coefficients, Cost, FloatArray

_NUM_QUANTILES = 2048  # more of them move no figure of a smooth distribution by a thousandth

Cumulative = Callable[[float], float]  # t ↦ E[cost; L ≤ t]
Points = tuple[FloatArray, FloatArray, FloatArray]  # new tokens, cached tokens, weight


class Lengths(Protocol):
    """A distribution of L, the uncached tokens, with the cached tokens that go with them; it may weigh less than 1."""

    @property
    def support(self) -> tuple[float, float]:
        """Return the least and the greatest L."""

    def cumulative(self, cost: Cost) -> Cumulative:
        """t ↦ E[cost; L ≤ t], exact; at the upper end of the support it is E[cost]."""

    def points(self, count: int) -> Points:
        """Return the distribution as at most about `count` weighted requests, in the order of their new tokens."""


@dataclass(frozen=True)
class LogNormal:
    """ln L is normal (mu, sigma), L is cut to [low, high]; each request finds cached_ratio × L tokens cached."""

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
        """Return how much of the untruncated distribution lies within the cut."""
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
            sum_ - integral(start) for sum_, integral, start in zip(before, antiderivatives, starts, strict=False)
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
        """x ↦ Σ c_k E[L^k; L ≤ x] of the untruncated distribution over the truncated mass.

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

    def points(self, count: int) -> Points:
        count = min(count, _NUM_QUANTILES)
        shares = self._below + self.kept_mass * (np.arange(count) + 0.5) / count
        inverse = NormalDist(self.mu, self.sigma).inv_cdf
        new = np.clip(np.exp([inverse(share) for share in shares]), self.low, self.high)
        return new, new * self.cached_ratio, np.full(count, 1.0 / count)


class Empirical:
    """The requests of a trace, each with its uncached and its cached tokens."""

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

    @property
    def requests(self) -> tuple[FloatArray, FloatArray]:
        """New and cached tokens of every request, in the order of their new tokens."""
        return self._new, self._cached

    def points(self, count: int) -> Points:
        size = min(len(self._new), count)
        chosen = ((np.arange(size) + 0.5) * len(self._new) / size).astype(int)
        return self._new[chosen], self._cached[chosen], np.full(size, 1.0 / size)


@dataclass(frozen=True)
class Mixture:
    """Several distributions, each with its weight; the weights may sum to less than 1."""

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

    def points(self, count: int) -> Points:
        arrays = [(weight, lengths.points(count)) for weight, lengths in self.parts]
        new = np.concatenate([points[0] for _, points in arrays])
        cached = np.concatenate([points[1] for _, points in arrays])
        weights = np.concatenate([weight * points[2] for weight, points in arrays])
        order = np.argsort(new, kind="stable")
        return new[order], cached[order], weights[order]


def expectation(lengths: Lengths, cost: Cost) -> float:
    """E[cost], over the whole distribution and not divided by its weight."""
    return lengths.cumulative(cost)(lengths.support[1])


def mean_tokens(lengths: Lengths) -> float:
    """E[L] in uncached tokens."""
    return expectation(lengths, NEW_TOKENS) / expectation(lengths, ONE)
