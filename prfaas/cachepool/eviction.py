"""Eviction order: block runs sorted by the last use of their tails."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from prfaas.cachepool.block_run import BlockRun

ALL = ""  # The view of every candidate.


class Candidates:
    """Runs whose tail may leave, least recently used first.

    Each run stands in the view of all and in the views that it was added to. A view is a heap with stale entries:
    discarding a run forgets its serial number, and the heap drops the entry later. Every operation costs O(log n) a view.
    """

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[int, int, BlockRun]]] = {ALL: []}  # (last use, serial, run)
        self._serials: dict[BlockRun, int] = {}
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._serials)

    def __contains__(self, run: BlockRun) -> bool:
        return run in self._serials

    def add(self, run: BlockRun, last_used: int, *, views: Iterable[str] = ()) -> None:
        """Add a run, or change the last use of a run that is there. A use is a count, not a time."""
        self._next_serial += 1
        self._serials[run] = self._next_serial
        for view in (ALL, *views):
            heap = self._heaps.setdefault(view, [])
            heapq.heappush(heap, (last_used, self._next_serial, run))
            if len(heap) > 2 * len(self._serials) + 64:
                self._compact(view)

    def discard(self, run: BlockRun) -> None:
        """Remove a run whose tail may not leave for now."""
        self._serials.pop(run, None)

    def pop(self, view: str = ALL) -> BlockRun | None:
        """Remove and return the first run of a view, or None when nothing may leave."""
        heap = self._heaps.get(view, [])
        while heap:
            _, serial, run = heapq.heappop(heap)
            if self._serials.get(run) == serial:
                del self._serials[run]
                return run
        return None

    def drop_view(self, view: str) -> None:
        """Forget a view that has no live runs left."""
        self._heaps.pop(view, None)

    def _compact(self, view: str) -> None:
        heap = [entry for entry in self._heaps[view] if self._serials.get(entry[2]) == entry[1]]
        heapq.heapify(heap)
        self._heaps[view] = heap
