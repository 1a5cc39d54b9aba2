"""Something that accrues over simulated time, such as busy seconds or bytes: how much in all, and in each part of a run."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prfaas.model.curve import FloatArray


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
        """The amount between each two neighbouring edges, which ascend."""
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
class Load:
    """What some meters show per second, over what they could at most together; 1 for a plain rate."""

    meters: Sequence[Meter]
    per_second: float = 1.0

    def over(self, edges: FloatArray) -> tuple[float, ...]:
        """The mean share, or rate, between each two neighbouring edges in seconds."""
        parts = sum((meter.between(edges) for meter in self.meters), np.zeros(len(edges) - 1))
        return tuple((parts / np.diff(edges) / self.per_second).tolist())
