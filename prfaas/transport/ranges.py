"""Ranges of numbers, and areas of bytes across many objects (pure)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


def first_bytes(buffers: Sequence[bytes | memoryview], num_bytes: int) -> list[memoryview]:
    """Return views of the first `num_bytes` of `buffers`, or of everything if there are fewer."""
    views = []
    for buffer in buffers:
        if num_bytes <= 0:
            break
        views.append(memoryview(buffer)[:num_bytes])
        num_bytes -= len(buffer)
    return views


def bytes_after(buffers: Sequence[bytes | memoryview], num_bytes: int) -> list[memoryview]:
    """Return views of `buffers` after the first `num_bytes`."""
    views = []
    for buffer in buffers:
        if num_bytes < len(buffer):
            views.append(memoryview(buffer)[num_bytes:])
        num_bytes = max(0, num_bytes - len(buffer))
    return views


class Ranges:
    """Disjoint half-open ranges in order; adjacent ones are merged."""

    __slots__ = ("_ends", "_starts", "total")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total = 0  # Count of covered numbers.
        for start, end in ranges:
            self.add(start, end)

    def __len__(self) -> int:
        """Return the number of disjoint ranges."""
        return len(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and (self._starts, self._ends) == (other._starts, other._ends)

    __hash__ = None  # type: ignore[assignment]

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._ends[at]

    def copy(self) -> Ranges:
        made = Ranges()
        made._starts, made._ends, made.total = self._starts[:], self._ends[:], self.total
        return made

    def add(self, start: int, end: int) -> int:
        """Cover [start, end). Returns how many numbers were not covered before."""
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
        """Uncover [start, end). Returns how many numbers were covered before."""
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
        """Return the parts of [start, end) that are not covered, in order."""
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
        """Return whether all of [start, end) is covered."""
        at = bisect_right(self._starts, start) - 1
        return start >= end or (at >= 0 and end <= self._ends[at])

    def touches(self, start: int, end: int) -> bool:
        """Return whether any of [start, end) is covered."""
        at = bisect_right(self._ends, start)
        return start < end and at < len(self._starts) and self._starts[at] < end

    def num_between(self, start: int, end: int) -> int:
        """Return how many of the ranges have numbers in [start, end)."""
        return bisect_left(self._starts, end) - bisect_right(self._ends, start)

    def to_list(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._ends, strict=True))


class Slab(NamedTuple):
    """Bytes [offset, offset + length) of each of the objects [first, first + num_objects)."""

    first: int
    num_objects: int
    offset: int
    length: int

    @property
    def num_bytes(self) -> int:
        return self.num_objects * self.length

    @property
    def last(self) -> int:
        """Index after the last object."""
        return self.first + self.num_objects

    @property
    def end(self) -> int:
        """Offset after the last byte."""
        return self.offset + self.length

    def overlaps(self, slab: Slab) -> bool:
        return self.first < slab.last and slab.first < self.last and self.offset < slab.end and slab.offset < self.end

    def precedes(self, slab: Slab) -> bool:
        """Return whether this slab may precede `slab` in a list of disjoint slabs, column by column."""
        is_same_column = (self.offset, self.length) == (slab.offset, slab.length)
        return self.last <= slab.first if is_same_column else self.end <= slab.offset


class Area:
    """Union of slabs, kept as disjoint columns: byte ranges with the objects that they cover."""

    def __init__(self, slabs: Iterable[Slab] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._objects: list[Ranges] = []
        self.num_bytes = 0
        self.num_fragments: int = 0  # Number of disjoint pieces, to which memory is proportional.
        for slab in slabs:
            self.add(slab)

    def growth(self, slab: Slab) -> int:
        """Return the largest number of pieces that adding or removing a slab may add.

        The columns in which the slab begins and ends are cut in two, with all their objects.
        """
        cuts = [at for position in (slab.offset, slab.end) if (at := self._within(position)) is not None]
        num_columns = bisect_left(self._starts, slab.end) - bisect_right(self._ends, slab.offset)
        return sum(len(self._objects[at]) for at in cuts) + 2 * num_columns + 1

    def add(self, slab: Slab) -> int:
        """Cover a slab. Returns how many bytes were not covered before."""
        new = 0
        for at in self._columns(slab.offset, slab.end):
            objects, width = self._objects[at], self._ends[at] - self._starts[at]
            before = len(objects)
            new += width * objects.add(slab.first, slab.last)
            self.num_fragments += len(objects) - before
        self.num_bytes += new
        return new

    def remove(self, slab: Slab) -> int:
        """Uncover a slab. Returns how many bytes were covered before."""
        for position in (slab.offset, slab.end):
            at = self._within(position)
            if at is not None and self._objects[at].touches(slab.first, slab.last):
                self._split(at, position)
        gone = 0
        for at in reversed(range(bisect_right(self._ends, slab.offset), bisect_left(self._starts, slab.end))):
            objects, width = self._objects[at], self._ends[at] - self._starts[at]
            before = len(objects)
            gone += width * objects.remove(slab.first, slab.last)
            self.num_fragments += len(objects) - before
            if not len(objects):
                del self._starts[at], self._ends[at], self._objects[at]
        self.num_bytes -= gone
        return gone

    def covers(self, slab: Slab) -> bool:
        """Return whether every byte of a slab is covered."""
        at, position = bisect_right(self._ends, slab.offset), slab.offset
        while position < slab.end:
            is_gap = at == len(self._starts) or self._starts[at] > position
            if is_gap or not self._objects[at].covers(slab.first, slab.last):
                return False
            position = self._ends[at]
            at += 1
        return True

    def missing(self, slab: Slab) -> Iterator[Slab]:
        """Yield the parts of a slab that are not covered, column by column."""
        at_byte = slab.offset
        for at in range(bisect_right(self._ends, slab.offset), len(self._starts)):
            start, end = max(self._starts[at], slab.offset), min(self._ends[at], slab.end)
            if start >= slab.end:
                break
            if at_byte < start:
                yield Slab(slab.first, slab.num_objects, at_byte, start - at_byte)
            for first, last in self._objects[at].missing(slab.first, slab.last):
                yield Slab(first, last - first, start, end - start)
            at_byte = end
        if at_byte < slab.end:
            yield Slab(slab.first, slab.num_objects, at_byte, slab.end - at_byte)

    def slabs(self) -> Iterator[Slab]:
        """Yield the disjoint slabs of the area, column by column."""
        for start, end, objects in zip(self._starts, self._ends, self._objects, strict=True):
            for first, last in objects.to_list():
                yield Slab(first, last - first, start, end - start)

    def _columns(self, start: int, end: int) -> range:
        """Return the columns that together are exactly [start, end). Splits and adds columns as needed."""
        first = bisect_left(self._starts, start)
        if first < len(self._starts) and self._starts[first] == start and self._ends[first] == end:
            return range(first, first + 1)
        for position in (start, end):
            at = self._within(position)
            if at is not None:
                self._split(at, position)
        at = bisect_left(self._starts, start)
        first = at
        while start < end:
            if at == len(self._starts) or self._starts[at] > start:
                upto = min(end, self._starts[at]) if at < len(self._starts) else end
                self._insert(at, start, upto, Ranges())
            start = self._ends[at]
            at += 1
        return range(first, at)

    def _within(self, position: int) -> int | None:
        """Return the column that has bytes on both sides of a position, or None."""
        at = bisect_right(self._starts, position) - 1
        return at if at >= 0 and self._starts[at] < position < self._ends[at] else None

    def _split(self, at: int, position: int) -> None:
        objects = self._objects[at].copy()
        self._insert(at + 1, position, self._ends[at], objects)
        self._ends[at] = position
        self.num_fragments += len(objects)

    def _insert(self, at: int, start: int, end: int, objects: Ranges) -> None:
        self._starts.insert(at, start)
        self._ends.insert(at, end)
        self._objects.insert(at, objects)
