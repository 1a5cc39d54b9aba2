"""Inter-token gaps: of a run, equal ones counted together, and of each request."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prfaas.model.cost.curve import FloatArray


class TokenGaps:
    """Seconds between two tokens of a request, each with how many tokens came after such a gap."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._tokens: list[float] = []

    def add(self, seconds: float, num_tokens: float) -> None:
        """So many tokens came so long after the one before; none is nothing."""
        if not num_tokens:
            return
        self._seconds.append(seconds)
        self._tokens.append(num_tokens)

    def arrays(self) -> tuple[FloatArray, FloatArray]:
        """(seconds, tokens)."""
        return np.array(self._seconds), np.array(self._tokens)


class StepLog:
    """How long each step of a batch took, runs of equal ones together."""

    __slots__ = ("_ends", "_seconds")

    def __init__(self) -> None:
        self._ends = array("q", (0,))  # the number of steps by the end of each run
        self._seconds = array("d")

    def add(self, num_steps: int, seconds: float) -> None:
        """So many more steps, each as long."""
        self._ends.append(self._ends[-1] + num_steps)
        self._seconds.append(seconds)

    def between(self, first: int, last: int) -> tuple[FloatArray, FloatArray]:
        """(seconds, steps) of the steps after `first` up to `last`."""
        start, stop = bisect_right(self._ends, first), bisect_right(self._ends, last - 1)
        ends = np.clip(np.array(self._ends[start - 1 : stop + 1]), first, last)
        return np.array(self._seconds[start - 1 : stop]), np.diff(ends).astype(float)


class Meter:
    """Amounts, each spread evenly over the time that it took."""

    __slots__ = ("_spans", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self._spans = array("d")  # start, end, amount; and so on

    def add(self, start: float, end: float, amount: float) -> None:
        """So much between these moments."""
        self.total += amount
        self._spans.extend((start, end, amount))

    def between(self, edges: FloatArray) -> FloatArray:
        """Return the amount between each two neighbouring edges, which ascend."""
        start, end, amount = (
            np.frombuffer(self._spans, dtype=float).reshape(-1, 3).T if self._spans else np.empty((3, 0))
        )
        lasting = end > start
        rate = np.divide(amount, end - start, out=np.zeros_like(amount), where=lasting)
        by_then = since(start[lasting], rate[lasting], edges) - since(end[lasting], rate[lasting], edges)
        at_once = _before(start[~lasting], amount[~lasting], edges)
        parts: FloatArray = np.diff(by_then + at_once)
        return parts


def since(moments: FloatArray, rates: FloatArray, edges: FloatArray) -> FloatArray:
    """For each edge the sum over the moments before it of rate · (edge − moment)."""
    return edges * _before(moments, rates, edges) - _before(moments, rates * moments, edges)


def _before(moments: FloatArray, values: FloatArray, edges: FloatArray) -> FloatArray:
    """For each edge the sum of the values whose moment is before it."""
    order = np.argsort(moments, kind="stable")
    sums = np.concatenate(([0.0], np.cumsum(values[order])))
    found: FloatArray = sums[np.searchsorted(moments[order], edges)]
    return found


@dataclass(frozen=True)
class LoadSeries:
    """What some meters show per second, over what they could at most together; 1 for a plain rate."""

    meters: Sequence[Meter]
    per_second: float = 1.0

    def over(self, edges: FloatArray) -> tuple[float, ...]:
        """Return the mean share, or rate, between each two neighbouring edges in seconds."""
        parts = sum((meter.between(edges) for meter in self.meters), np.zeros(len(edges) - 1))
        return tuple((parts / np.diff(edges) / self.per_second).tolist())
