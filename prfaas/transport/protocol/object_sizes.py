"""The sizes of a transfer's objects, kept as runs of equal ones: a peer's short message cannot claim much memory (pure)."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import overload

from prfaas.transport.ranges import Ranges, Slab

MAX_OBJECTS = 1 << 21  # 1M tokens in blocks of 16, 8 ranks, 4 groups; as a bitmap 256 KiB
MAX_OBJECT_BYTES = 1 << 32
MAX_RUNS = 1 << 12  # about 200 bytes each; an honest sender's are its KV groups times its ranks


class ObjectSizes(Sequence[int]):
    """Sizes in bytes, by object index."""

    def __init__(self, runs: Iterable[tuple[int, int]]) -> None:
        """`runs` are (size, count); neighbours of one size become one.

        Raises:
            ValueError: a size or the number of objects is out of bounds.
        """
        alike = itertools.groupby(runs, key=lambda run: run[0])
        self.runs: list[tuple[int, int]] = [(size, sum(count for _, count in its)) for size, its in alike]
        if not all(0 < size <= MAX_OBJECT_BYTES and 0 < count <= MAX_OBJECTS for size, count in self.runs):
            raise ValueError("an object of no bytes, or of too many")
        self._lasts = list(itertools.accumulate(count for _, count in self.runs))
        if len(self) > MAX_OBJECTS or len(self.runs) > MAX_RUNS:
            raise ValueError(f"{len(self)} objects in {len(self.runs)} runs; limits are {MAX_OBJECTS} and {MAX_RUNS}")
        self.total_bytes = sum(size * count for size, count in self.runs)

    @staticmethod
    def of(sizes: Sequence[int]) -> ObjectSizes:
        """The runs of plain sizes."""
        if isinstance(sizes, ObjectSizes):
            return sizes
        return ObjectSizes((size, len(list(same))) for size, same in itertools.groupby(sizes))

    def __len__(self) -> int:
        return self._lasts[-1] if self._lasts else 0

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.runs[bisect_right(self._lasts, index)][0]

    def holds(self, slab: Slab) -> bool:
        """Whether every object of a slab exists and has its bytes."""
        if slab.last > len(self):
            return False
        at = bisect_right(self._lasts, slab.first)
        while self.runs[at][0] >= slab.end:
            if self._lasts[at] >= slab.last:
                return True
            at += 1
        return False

    def bytes_of(self, objects: Ranges) -> int:
        """Total size of the objects in `objects`."""
        total = 0
        for first, last in objects.to_list():
            while first < last:
                at = bisect_right(self._lasts, first)
                upto = min(last, self._lasts[at])
                total += self.runs[at][0] * (upto - first)
                first = upto
        return total
