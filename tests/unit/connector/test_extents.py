"""Extents of an arena: whole pages and slots, pinned in order as they are used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from hypothesis import given
from hypothesis import strategies as st

from prfaas.cachepool.arena import PAGE_BYTES
from prfaas.connector.worker.copy_cuda import Extents
from tests.support.waiting import PATIENCE_SECONDS, wait_until

SLOT = 1024  # A quarter of a page.
EACH = 8  # Slots of an extent of two pages.


class Memory:
    """Memory that can be pinned up to a limit."""

    def __init__(self, *, limit_bytes: int = 1 << 60) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.tried = 0
        self._left = limit_bytes

    def pin(self, offset: int, num_bytes: int) -> bool:
        self.tried += 1
        self._left -= num_bytes
        if self._left < 0:
            return False
        self.pinned.append((offset, num_bytes))
        return True


@contextmanager
def extents_of(memory: Memory, *, num_slots: int = 80, ahead: int = 0) -> Iterator[Extents]:
    """Yield extents of two pages, `ahead` of which are pinned early."""
    extent = EACH * SLOT
    extents = Extents(
        num_slots=num_slots, slot_bytes=SLOT, pin=memory.pin, extent_bytes=extent, ahead_bytes=ahead * extent
    )
    yield extents
    extents.close()


@given(
    num_slots=st.integers(1, 300),
    slot_bytes=st.integers(1, 300).map(lambda lines: 64 * lines),
    extent_bytes=st.integers(1, 1 << 17),
    data=st.data(),
)
def test_extents_are_whole_pages_and_slots_and_those_up_to_the_last_slot_of_use_are_pinned(
    num_slots: int, slot_bytes: int, extent_bytes: int, data: st.DataObject
) -> None:
    memory, used = Memory(), data.draw(st.lists(st.integers(0, num_slots - 1), min_size=1, max_size=5))
    extents = Extents(
        num_slots=num_slots, slot_bytes=slot_bytes, pin=memory.pin, extent_bytes=extent_bytes, ahead_bytes=0
    )
    assert extents.pin(used)
    ends = [offset + num_bytes for offset, num_bytes in memory.pinned]
    assert [offset for offset, _ in memory.pinned] == [0, *ends[:-1]]
    assert all(end % PAGE_BYTES == 0 and end % slot_bytes == 0 for end in ends[:-1])
    start_of_last = memory.pinned[-1][0]
    assert (
        start_of_last <= max(used) * slot_bytes and (max(used) + 1) * slot_bytes <= ends[-1] <= num_slots * slot_bytes
    )
    extents.close()


def test_the_last_extent_ends_with_the_last_slot() -> None:
    memory = Memory()
    with extents_of(memory, num_slots=EACH + 3) as extents:
        assert extents.pin([EACH + 2])
    assert memory.pinned == [(0, EACH * SLOT), (EACH * SLOT, 3 * SLOT)]


def test_the_first_extent_is_pinned_alone() -> None:
    memory = Memory()
    with extents_of(memory, ahead=3) as extents:
        assert extents.pin_first()
    assert memory.pinned == [(0, EACH * SLOT)]


def test_each_extent_is_pinned_once_in_order_and_those_ahead_are_too() -> None:
    memory = Memory()
    with extents_of(memory, ahead=2) as extents:
        for slots in ([0, 3], [EACH, 1], [5 * EACH], [2]):
            assert extents.pin(slots)
        wait_until(lambda: len(memory.pinned) == 5 + 1 + 2, what="those ahead")
    assert [offset // (EACH * SLOT) for offset, _ in memory.pinned] == list(range(8))


def test_behind_what_cannot_be_pinned_nothing_is_tried_and_nothing_reached() -> None:
    memory = Memory(limit_bytes=3 * EACH * SLOT)
    with extents_of(memory) as extents:
        assert not extents.pin([6 * EACH])
        assert extents.pin([3 * EACH - 1]) and not extents.pin([3 * EACH])
        assert not extents.pin([9 * EACH])
    assert len(memory.pinned) == 3 and memory.tried == 4


def test_a_slot_is_reached_only_once_its_extent_is_pinned() -> None:
    begun, may_end = threading.Event(), threading.Event()
    memory = Memory()

    class Slow(Memory):
        def pin(self, offset: int, num_bytes: int) -> bool:
            begun.set()
            assert may_end.wait(PATIENCE_SECONDS)
            return memory.pin(offset, num_bytes)

    with extents_of(Slow()) as extents, ThreadPoolExecutor(1) as user:
        reached = user.submit(lambda: (extents.pin([2]), list(memory.pinned)))
        assert begun.wait(PATIENCE_SECONDS)
        may_end.set()
        assert reached.result(PATIENCE_SECONDS) == (True, [(0, EACH * SLOT)])


def test_the_end_names_what_was_pinned_and_nothing_is_pinned_after_it() -> None:
    memory = Memory()
    with extents_of(memory, ahead=100) as extents:
        extents.pin([0])
        offsets = extents.close()
        assert offsets == [offset for offset, _ in memory.pinned]
        assert extents.close() == offsets
