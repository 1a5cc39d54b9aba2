"""Where a rising and a falling function meet, to the integer: the root finding behind thresholds and splits."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


def first_at_least(claim: Callable[[int], bool], low: int, high: int) -> int:
    """Return the least integer in [low, high] for which `claim` holds; `claim` never turns false again and holds at `high`."""
    while low < high:
        middle = (low + high) // 2
        if claim(middle):
            high = middle
        else:
            low = middle + 1
    return low


def best_of_two(value: Callable[[int], float], rising_wins: Callable[[int], bool], low: int, high: int) -> int:
    """Return the integer that maximises min(rising, falling), where `rising_wins` says that rising ≥ falling.

    The greatest minimum lies at the crossing or just before it.
    """
    after = first_at_least(rising_wins, low, high)
    return max((max(after - 1, low), after), key=value)


def best_fraction(
    value: Callable[[float], float], rising_wins: Callable[[float], bool], low: float, high: float
) -> float:
    """As `best_of_two` over the real numbers, to one part in 10^12 of the interval."""
    for _ in range(40):
        middle = 0.5 * (low + high)
        if rising_wins(middle):
            high = middle
        else:
            low = middle
    return max((low, high), key=value)


FloatArray = NDArray[np.float64]
Coefficients = tuple[float, float, float]  # of 1, l and l²


class Cost(Protocol):
    """What a request costs somewhere, as a function of its uncached (`new`) and cached tokens."""

    def at(self, new: FloatArray, cached: FloatArray) -> FloatArray:
        """Return the cost of each request; shape as the arguments."""

    def along(self, cached_ratio: float) -> Curve:
        """Return the cost as a function of the new tokens alone where cached = `cached_ratio` × new."""


@dataclass(frozen=True)
class Curve:
    """f(l) = c0 + c1 l + c2 l², with its own coefficients between each two `knots`; the outer pieces go on for ever."""

    knots: tuple[float, ...]
    pieces: tuple[Coefficients, ...]

    def __call__(self, tokens: float) -> float:
        c0, c1, c2 = self.pieces[bisect.bisect_right(self.knots, tokens)]
        return c0 + (c1 + c2 * tokens) * tokens

    def many(self, tokens: FloatArray) -> FloatArray:
        """f of each element."""
        if not self.knots:
            c0, c1, c2 = self.pieces[0]
            straight: FloatArray = c0 + (c1 + c2 * tokens) * tokens
            return straight
        coefficients = np.asarray(self.pieces)[np.searchsorted(self.knots, tokens, side="right")]
        result: FloatArray = coefficients[..., 0] + (coefficients[..., 1] + coefficients[..., 2] * tokens) * tokens
        return result

    def spans(self) -> Iterator[tuple[float, float, Coefficients]]:
        """Yield each piece as (from, to, coefficients)."""
        edges = (-np.inf, *self.knots, np.inf)
        yield from zip(edges[:-1], edges[1:], self.pieces, strict=True)

    def times(self, factor: float) -> Curve:
        """l ↦ factor · f(l)."""
        return Curve(self.knots, tuple((a * factor, b * factor, c * factor) for a, b, c in self.pieces))

    def stretched(self, factor: float) -> Curve:
        """l ↦ f(factor · l), factor > 0."""
        pieces = tuple((a, b * factor, c * factor**2) for a, b, c in self.pieces)
        return Curve(tuple(knot / factor for knot in self.knots), pieces)

    def plus(self, other: Curve) -> Curve:
        """l ↦ f(l) + g(l)."""
        knots = tuple(sorted({*self.knots, *other.knots}))
        pieces = []
        for start in (-np.inf, *knots):
            a, b, c = self.pieces[bisect.bisect_right(self.knots, start)]
            d, e, f = other.pieces[bisect.bisect_right(other.knots, start)]
            pieces.append((a + d, b + e, c + f))
        return Curve(knots, tuple(pieces))


@dataclass(frozen=True)
class OfNewTokens:
    """A cost that does not depend on what is cached."""

    curve: Curve

    def at(self, new: FloatArray, cached: FloatArray) -> FloatArray:
        return self.curve.many(new)

    def along(self, cached_ratio: float) -> Curve:
        return self.curve


@dataclass(frozen=True)
class CachedTokens:
    """The number of cached tokens itself."""

    def at(self, new: FloatArray, cached: FloatArray) -> FloatArray:
        return cached

    def along(self, cached_ratio: float) -> Curve:
        return polynomial(0.0, cached_ratio)


def polynomial(constant: float, linear: float = 0.0, quadratic: float = 0.0) -> Curve:
    """Return the curve of one piece."""
    return Curve((), ((constant, linear, quadratic),))


ONE = OfNewTokens(polynomial(1.0))
NEW_TOKENS = OfNewTokens(polynomial(0.0, 1.0))


def through(tokens: Sequence[float], values: Sequence[float]) -> Curve:
    """Straight lines through the points, the outer ones prolonged; `tokens` strictly increase.

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
    thousands = np.asarray(tokens, dtype=float) / 1000.0  # keeps the normal equations well conditioned
    powers = np.vander(thousands, 3, increasing=True)
    solution, *_ = np.linalg.lstsq(powers, np.asarray(values, dtype=float), rcond=None)
    return polynomial(float(solution[0]), float(solution[1]) / 1e3, float(solution[2]) / 1e6)
