"""The least of several costs of a request, in expectation over a distribution of lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prfaas.model.cost.curve import Cost, Curve, FloatArray, OfNewTokens, polynomial
from prfaas.model.cost.lengths import Empirical, Lengths, LogNormal, Mixture

_NUM_GRID = 1024


@dataclass(frozen=True)
class WeightedCost:
    """Σ factor · cost."""

    terms: tuple[tuple[float, Cost], ...]

    def at(self, new: FloatArray, cached: FloatArray) -> FloatArray:
        total = np.zeros_like(new)
        for factor, cost in self.terms:
            if factor:
                total = total + factor * cost.at(new, cached)
        return total

    def along(self, cached_ratio: float) -> Curve:
        total = polynomial(0.0)
        for factor, cost in self.terms:
            if factor:
                total = total.plus(cost.along(cached_ratio).times(factor))
        return total


def expected_minimum(lengths: Lengths, costs: Sequence[Cost]) -> float:
    """E[min over costs]: exact for traces; for closed forms up to crossings nearer than a thousandth of the range."""
    if isinstance(lengths, Mixture):
        return sum(weight * expected_minimum(part, costs) for weight, part in lengths.parts)
    if isinstance(lengths, LogNormal):
        return _closed_form(lengths, [cost.along(lengths.cached_ratio) for cost in costs])
    assert isinstance(lengths, Empirical)
    return float(np.minimum.reduce([cost.at(*lengths.requests) for cost in costs]).mean())


def _closed_form(lengths: LogNormal, curves: list[Curve]) -> float:
    grid = np.geomspace(lengths.low, lengths.high, _NUM_GRID)
    least = np.argmin([curve.many(grid) for curve in curves], axis=0)
    changes = np.flatnonzero(np.diff(least))
    crossings = [_crossing(curves[least[i]], curves[least[i + 1]], float(grid[i]), float(grid[i + 1])) for i in changes]
    edges = [lengths.low, *crossings, lengths.high]
    choices = [int(least[0]), *(int(least[i + 1]) for i in changes)]
    partial = {choice: lengths.cumulative(OfNewTokens(curves[choice])) for choice in set(choices)}
    return sum(
        partial[c](end) - partial[c](start) for c, start, end in zip(choices, edges[:-1], edges[1:], strict=True)
    )


def _crossing(before: Curve, after: Curve, low: float, high: float) -> float:
    """Return where `before` stops being the lesser of the two."""
    for _ in range(40):
        middle = 0.5 * (low + high)
        if before(middle) <= after(middle):
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)
