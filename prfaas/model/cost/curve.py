"""Costs of a request as a function of its length: piecewise quadratic curves and sums of them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
# Coefficients of 1, l and l².
Coefficients = tuple[float, float, float]


# Maps uncached (new) and cached tokens of each request to the cost of each, such as seconds.
Cost = Callable[[FloatArray, FloatArray], FloatArray]


@dataclass(frozen=True)
class Curve:
    """Piecewise quadratic f(l) = c0 + c1 l + c2 l² with knots between the pieces. The outer pieces are unbounded."""

    knots: tuple[float, ...]
    pieces: tuple[Coefficients, ...]

    def __call__(self, tokens: float) -> float:
        c0, c1, c2 = self.pieces[bisect.bisect_right(self.knots, tokens)]
        return c0 + (c1 + c2 * tokens) * tokens

    def many(self, tokens: FloatArray) -> FloatArray:
        """Return f of each element."""
        if not self.knots:
            c0, c1, c2 = self.pieces[0]
            straight: FloatArray = c0 + (c1 + c2 * tokens) * tokens
            return straight
        coefficients = np.asarray(self.pieces)[np.searchsorted(self.knots, tokens, side="right")]
        result: FloatArray = coefficients[..., 0] + (coefficients[..., 1] + coefficients[..., 2] * tokens) * tokens
        return result

    def times(self, factor: float) -> Curve:
        """Return l ↦ factor · f(l)."""
        return Curve(self.knots, tuple((a * factor, b * factor, c * factor) for a, b, c in self.pieces))

    def plus(self, addend: Curve) -> Curve:
        """Return the sum of both curves."""
        knots = tuple(sorted({*self.knots, *addend.knots}))
        pieces = []
        for start in (-np.inf, *knots):
            a, b, c = self.pieces[bisect.bisect_right(self.knots, start)]
            d, e, f = addend.pieces[bisect.bisect_right(addend.knots, start)]
            pieces.append((a + d, b + e, c + f))
        return Curve(knots, tuple(pieces))


def unit_cost(new: FloatArray, cached: FloatArray) -> FloatArray:
    """Return 1 for each request, as a `Cost`."""
    return np.ones_like(new)


def new_tokens(new: FloatArray, cached: FloatArray) -> FloatArray:
    """Return the uncached tokens, as a `Cost`."""
    return new


def cached_tokens(new: FloatArray, cached: FloatArray) -> FloatArray:
    """Return the cached tokens, as a `Cost`."""
    return cached


def of_new_tokens(curve: Curve) -> Cost:
    """Return a cost that does not depend on the cached tokens."""
    return lambda new, cached: curve.many(new)


def weighted_sum(terms: Sequence[tuple[float, Cost]]) -> Cost:
    """Return Σ factor · cost."""

    def total(new: FloatArray, cached: FloatArray) -> FloatArray:
        return sum((factor * cost(new, cached) for factor, cost in terms if factor), np.zeros_like(new))

    return total


def polynomial(constant: float, linear: float = 0.0, quadratic: float = 0.0) -> Curve:
    """Return the curve of one piece."""
    return Curve((), ((constant, linear, quadratic),))


def through(tokens: Sequence[float], values: Sequence[float]) -> Curve:
    """Return straight lines through the points, the outer ones extended; `tokens` strictly increase.

    Raises:
        ValueError: fewer than two points, or tokens that do not increase.
    """
    if len(tokens) < 2 or any(b <= a for a, b in itertools.pairwise(tokens)):
        raise ValueError("at least two points with increasing lengths are needed")
    pieces = []
    for (x0, y0), (x1, y1) in itertools.pairwise(zip(tokens, values, strict=True)):
        slope = (y1 - y0) / (x1 - x0)
        pieces.append((y0 - slope * x0, slope, 0.0))
    return Curve(tuple(tokens[1:-1]), tuple(pieces))


def fitted(tokens: Sequence[float], values: Sequence[float]) -> Curve:
    """Return the least-squares quadratic through the points.

    Raises:
        ValueError: fewer than three points.
    """
    if len(tokens) < 3:
        raise ValueError("a quadratic needs at least three points")
    # In thousands the normal equations are well conditioned.
    thousands = np.asarray(tokens, dtype=float) / 1000.0
    powers = np.vander(thousands, 3, increasing=True)
    solution, *_ = np.linalg.lstsq(powers, np.asarray(values, dtype=float), rcond=None)
    return polynomial(float(solution[0]), float(solution[1]) / 1e3, float(solution[2]) / 1e6)


def weighted(tokens: Sequence[float], values: Sequence[float]) -> Curve:
    """Return the rising quadratic with the least relative errors at the points.

    Raises:
        ValueError: fewer than two points.
    """
    if len(tokens) < 2:
        raise ValueError("a curve needs at least two points")
    thousands = np.asarray(tokens, dtype=float) / 1000.0
    columns: FloatArray = np.vander(thousands, min(3, len(tokens)), increasing=True).astype(np.float64)
    constant, linear, quadratic = (*nonnegative_fit(columns, np.asarray(values, dtype=float)), 0.0)[:3]
    return polynomial(constant, linear / 1e3, quadratic / 1e6)


def nonnegative_fit(columns: FloatArray, values: FloatArray) -> tuple[float, ...]:
    """Return the coefficients ≥ 0 of the columns that fit positive values with the least relative errors.

    There are few columns, so each subset of them is tried.
    """
    scaled = columns / values[:, None]
    best, least = np.zeros(columns.shape[1]), np.inf
    for size in range(1, columns.shape[1] + 1):
        for subset in itertools.combinations(range(columns.shape[1]), size):
            chosen = list(subset)
            solution, *_ = np.linalg.lstsq(scaled[:, chosen], np.ones(len(values)), rcond=None)
            error = float(((scaled[:, chosen] @ solution - 1.0) ** 2).sum())
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(columns.shape[1]), error
                best[chosen] = solution
    return tuple(best.tolist())
