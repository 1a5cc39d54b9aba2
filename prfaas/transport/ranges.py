"""A set of whole numbers as disjoint ranges: byte positions, or object indices (pure)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class Ranges:
    """Disjoint half-open ranges in order; adjacent ones are merged."""

    __slots__ = ("_ends", "_starts", "total")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total = 0  # numbers covered
        for start, end in ranges:
            self.add(start, end)

    def __len__(self) -> int:
        """How many disjoint ranges."""
        return len(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and (self._starts, self._ends) == (other._starts, other._ends)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._ends[at]

    def copy(self) -> Ranges:
        made = Ranges()
        made._starts, made._ends, made.total = self._starts[:], self._ends[:], self.total
        return made

    def add(self, start: int, end: int) -> int:
        """Cover [start, end); returns how many numbers were not covered before."""
        if start >= end:
            return 0
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        before = sum(self._ends[i] - self._starts[i] for i in range(first, last))
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        new = end - start - before
        self.total += new
        return new

    def remove(self, start: int, end: int) -> int:
        """Uncover [start, end); returns how many numbers were covered before."""
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        if start >= end or first >= last:
            return 0
        before = sum(self._ends[i] - self._starts[i] for i in range(first, last))
        kept = [(self._starts[first], start), (end, self._ends[last - 1])]
        kept = [(a, b) for a, b in kept if a < b]
        self._starts[first:last] = [a for a, _ in kept]
        self._ends[first:last] = [b for _, b in kept]
        gone = before - sum(b - a for a, b in kept)
        self.total -= gone
        return gone

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of [start, end) that are not covered, in order."""
        gaps = []
        for at in range(bisect_right(self._ends, start), len(self._starts)):
            if self._starts[at] >= end:
                break
            if self._starts[at] > start:
                gaps.append((start, self._starts[at]))
            start = max(start, self._ends[at])
        if start < end:
            gaps.append((start, end))
        return gaps

    def covers(self, start: int, end: int) -> bool:
        """Whether all of [start, end) is covered."""
        at = bisect_right(self._starts, start) - 1
        return start >= end or (at >= 0 and end <= self._ends[at])

    def touches(self, start: int, end: int) -> bool:
        """Whether any of [start, end) is covered."""
        at = bisect_right(self._ends, start)
        return start < end and at < len(self._starts) and self._starts[at] < end

    def num_between(self, start: int, end: int) -> int:
        """How many of the ranges have numbers in [start, end)."""
        return bisect_left(self._starts, end) - bisect_right(self._ends, start)

    def to_list(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._ends, strict=True))
