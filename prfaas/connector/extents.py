"""What of an arena a device may reach: extents of whole pages and whole slots, pinned in order as slots come into use.

A pool gives out what was used before first and then the lowest slot, so that about as much is pinned as was ever in use
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import lcm

from prfaas.cachepool.arena import PAGE_BYTES

# To pin takes 0.1 s a GB (vLLM's pull request 51081, H200), and the driver may hold up other threads' work meanwhile.
EXTENT_BYTES = 64 << 20
AHEAD_BYTES = 1 << 30  # are pinned before they are needed


class Extents:
    """The extents of one arena's slots. One thread pins; another one uses what is pinned."""

    def __init__(
        self,
        *,
        num_slots: int,
        slot_bytes: int,
        pin: Callable[[int, int], bool],
        extent_bytes: int = EXTENT_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        """`pin` of an offset from the first slot and a number of bytes says whether they could be pinned."""
        self._pin = pin
        self._total_bytes = num_slots * slot_bytes
        aligned_bytes = lcm(PAGE_BYTES, slot_bytes)
        self._extent_bytes = max(1, extent_bytes // aligned_bytes) * aligned_bytes
        self._slots_each = self._extent_bytes // slot_bytes
        self._num_ahead = -(-ahead_bytes // self._extent_bytes)
        self._ranges = self._all()
        self._begun: list[Future[bool]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prfaas-pins")

    def _all(self) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of each."""
        for offset in range(0, self._total_bytes, self._extent_bytes):
            yield offset, min(self._extent_bytes, self._total_bytes - offset)

    def reach_first(self) -> bool:
        """Pin the first extent and no more: an engine that records CUDA graphs afterwards must not meet a pin under way."""
        self._begin(1)
        return self._begun[0].result()

    def reach(self, slots: Sequence[int]) -> bool:
        """Whether a device may reach all of these; waits for what is still being pinned, and has what follows pinned."""
        last = max(slots, default=0) // self._slots_each
        self._begin(last + 1 + self._num_ahead)
        return self._begun[last].result()

    def _begin(self, num_extents: int) -> None:
        while len(self._begun) < num_extents and (its := next(self._ranges, None)) is not None:
            before = self._begun[-1] if self._begun else None
            self._begun.append(self._thread.submit(self._pin_after, before, *its))

    def _pin_after(self, before: Future[bool] | None, offset: int, num_bytes: int) -> bool:
        """Behind one that could not be pinned none is: the system's limit is reached."""
        return (before is None or before.result()) and self._pin(offset, num_bytes)

    def close(self) -> list[int]:
        """End the thread; the offsets of what it has pinned."""
        self._thread.shutdown(cancel_futures=True)
        pinned = (its for its in self._begun if not its.cancelled() and its.result())
        return [place * self._extent_bytes for place, _ in enumerate(pinned)]
