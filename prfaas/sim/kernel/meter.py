"""Meters of a run: durations of steps, and amounts spread over time."""

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

    def until(self, moment: float) -> float:
        """Return the amount before a moment."""
        if not self._spans:
            return 0.0
        start, end, amount = np.frombuffer(self._spans, dtype=float).reshape(-1, 3).T
        at_once = (start < moment).astype(float)
        share = np.divide(moment - start, end - start, out=at_once, where=end > start)
        return float(amount @ np.clip(share, 0.0, 1.0))


@dataclass(frozen=True)
class Load:
    """Sum of meters per second, relative to `per_second`; 1 gives a plain rate."""

    meters: Sequence[Meter]
    per_second: float = 1.0

    def until(self, moment: float) -> float:
        """Return the mean share, or rate, from 0 to a moment in seconds."""
        return sum(meter.until(moment) for meter in self.meters) / moment / self.per_second
