"""A set of byte ranges, for what has arrived of an object (pure)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Ranges:
    """Disjoint half-open ranges in order; adjacent ones are merged."""

    __slots__ = ("_ends", "_starts", "total")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total = 0  # bytes covered

    def add(self, start: int, end: int) -> int:
        """Cover [start, end); returns the number of bytes that were not covered before."""
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

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of [start, end) that are not covered."""
        gaps = []
        for known_start, known_end in zip(self._starts, self._ends, strict=True):
            if known_end <= start:
                continue
            if known_start >= end:
                break
            if known_start > start:
                gaps.append((start, known_start))
            start = max(start, known_end)
        if start < end:
            gaps.append((start, end))
        return gaps

    def to_list(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._ends, strict=True))
