"""Meters of a run: durations of steps, and amounts spread over time."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prfaas.model.cost.curve import FloatArray


class StepLog:
    """Durations of a batch's steps; runs of equal steps are one entry."""

    __slots__ = ("_ends", "_seconds")

    def __init__(self) -> None:
        # Total number of steps at the end of each run.
        self._ends = array("q", (0,))
        self._seconds = array("d")

    def add(self, num_steps: int, seconds: float) -> None:
        """Add a run of steps that took `seconds` each."""
        self._ends.append(self._ends[-1] + num_steps)
        self._seconds.append(seconds)

    def between(self, first: int, last: int) -> tuple[FloatArray, FloatArray]:
        """Return (seconds, steps) of the runs after step `first` up to step `last`."""
        start, stop = bisect_right(self._ends, first), bisect_right(self._ends, last - 1)
        ends = np.clip(np.array(self._ends[start - 1 : stop + 1]), first, last)
        return np.array(self._seconds[start - 1 : stop]), np.diff(ends).astype(float)


class Meter:
    """Amounts, each spread evenly over a span of time."""

    __slots__ = ("_spans", "total")

    def __init__(self) -> None:
        self.total = 0.0
        # Start, end and amount of each span in turn.
        self._spans = array("d")

    def add(self, start: float, end: float, amount: float) -> None:
        """Add an amount between two moments."""
        self.total += amount
        self._spans.extend((start, end, amount))

    def between(self, edges: FloatArray) -> FloatArray:
        """Return the amount between each two neighbouring `edges`, which ascend."""
        start, end, amount = (
            np.frombuffer(self._spans, dtype=float).reshape(-1, 3).T if self._spans else np.empty((3, 0))
        )
        lasting = end > start
        rate = np.divide(amount, end - start, out=np.zeros_like(amount), where=lasting)
        starts, ends = (integral_since(at[lasting], rate[lasting], edges) for at in (start, end))
        at_once = _before(start[~lasting], amount[~lasting], edges)
        parts: FloatArray = np.diff(starts - ends + at_once)
        return parts


def integral_since(moments: FloatArray, rates: FloatArray, edges: FloatArray) -> FloatArray:
    """Return for each edge the sum of rate · (edge − moment) over the moments before it."""
    return edges * _before(moments, rates, edges) - _before(moments, rates * moments, edges)


def _before(moments: FloatArray, values: FloatArray, edges: FloatArray) -> FloatArray:
    """Return for each edge the sum of the values at moments before it."""
    order = np.argsort(moments, kind="stable")
    sums = np.concatenate(([0.0], np.cumsum(values[order])))
    found: FloatArray = sums[np.searchsorted(moments[order], edges)]
    return found


@dataclass(frozen=True)
class LoadSeries:
    """Sum of meters per second, relative to `per_second`; 1 gives a plain rate."""

    meters: Sequence[Meter]
    per_second: float = 1.0

    def over(self, edges: FloatArray) -> tuple[float, ...]:
        """Return the mean share, or rate, between each two neighbouring edges in seconds."""
        parts = sum((meter.between(edges) for meter in self.meters), np.zeros(len(edges) - 1))
        return tuple((parts / np.diff(edges) / self.per_second).tolist())
