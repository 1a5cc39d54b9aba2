"""The arena: equal slots for the blocks of one layout, in shared memory that engines map."""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from prfaas.kv.layout import Layout

PAGE_BYTES = mmap.PAGESIZE
MAX_NODES = 1024  # The most that Linux supports.
MAX_SLOTS_PER_ROW = 128  # Bounds the bookkeeping that a layout may cost.
_GENERATION_BYTES = 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_MBIND = {"x86_64": 237, "aarch64": 235}  # System call that libc has no function for.
_PREFER = 1  # MPOL_PREFERRED
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class SlotShape:
    """Size of a layout's slots, and the number of adjacent slots that a block of each group takes.

    A block takes one slot, or a *row* of slots if other blocks are pieces: a slot then takes a piece. The first slot of a
    row, a multiple of its length, names the block.
    """

    stride_bytes: int  # Whole pages, for direct I/O.
    slots_per_block: tuple[int, ...]

    @property
    def slots_per_row(self) -> int:
        return max(self.slots_per_block)

    @property
    def row_bytes(self) -> int:
        return self.slots_per_row * self.stride_bytes


def shape_of(layout: Layout) -> SlotShape:
    """Return the slots that hold the widest piece, in rows for the widest block; without pieces a row is one slot."""
    widest = max(group.block_bytes for group in layout.groups)
    piece = max((group.block_bytes for group in layout.groups if group.has_pieces), default=widest)
    stride = whole_pages(max(piece, -(-widest // MAX_SLOTS_PER_ROW)))
    slots_per_row = -(-widest // stride)
    return SlotShape(stride, tuple(1 if group.has_pieces else slots_per_row for group in layout.groups))


def whole_pages(num_bytes: int) -> int:
    """Return the size of the pages that so many bytes take."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class SlotMemory(Protocol):
    """Memory or file in which a pool keeps its slots."""

    layout: Layout
    pinned: bool
    num_slots: int  # A multiple of a row.
    shape: SlotShape

    def bump(self, slots: Iterable[int]) -> None: ...

    def give_back(self, slots: Iterable[int]) -> None: ...

    def close(self) -> None: ...


class Arena:
    """Sealed memfd with a table of one u64 generation per slot, then the slots. The system backs pages on first use.

    `pinned` means that a device may reach the memory by its physical address, so its pages must stay.
    """

    def __init__(self, layout: Layout, num_slots: int) -> None:
        self.layout = layout
        self.pinned = False
        self.num_slots = num_slots
        self.shape = shape_of(layout)
        self.stride_bytes = self.shape.stride_bytes
        self.header_bytes = whole_pages(num_slots * _GENERATION_BYTES)
        size = self.header_bytes + num_slots * self.stride_bytes
        self.fd = os.memfd_create("prfaas-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self.fd, size)
        self._view = memoryview(self._map)
        self._last_generation = 0
        self._generations = self._view[: num_slots * _GENERATION_BYTES].cast("Q")

    def slot_view(self, slot: int, group: int = 0) -> memoryview:
        """Return the bytes of the slots of a group's block, padding included; valid until `close`."""
        start = self.header_bytes + slot * self.stride_bytes
        return self._view[start : start + self.shape.slots_per_block[group] * self.stride_bytes]

    @property
    def memory(self) -> memoryview:
        """The whole arena, header first; valid until `close`."""
        return self._view

    def generation(self, slot: int) -> int:
        return self._generations[slot]

    def bump(self, slots: Iterable[int]) -> None:
        """Give slots a new generation, so that readers notice that they hold other blocks."""
        generations = self._generations
        self._last_generation = generation = self._last_generation + 1
        for slot in slots:
            generations[slot] = generation

    def give_back(self, slots: Iterable[int]) -> None:
        """Return the memory of unused slots to the system. Their contents are lost.

        Raises:
            OSError: the system refuses.
        """
        assert not self.pinned, "a device would go on writing to the pages that leave"
        for first, end in slot_ranges(slots):
            punch_hole(self.fd, self.header_bytes + first * self.stride_bytes, (end - first) * self.stride_bytes)

    def prefer_node(self, node: int) -> None:
        """Prefer a NUMA node for all pages that nothing has touched yet, whoever touches them first.

        Raises:
            OSError: the system refuses.
        """
        if not 0 <= node < MAX_NODES:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        nodes = (ctypes.c_uint64 * (MAX_NODES // 64))()
        nodes[node // 64] = 1 << node % 64
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        address, size, num_bits = ctypes.c_void_p(start), ctypes.c_ulong(len(self._map)), ctypes.c_ulong(MAX_NODES + 1)
        if _libc.syscall(_MBIND.get(platform.machine(), -1), address, size, _PREFER, nodes, num_bits, 0):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def populate_later(self, slots: range) -> Callable[[], None]:
        """Return a call, for any thread, that backs adjacent slots with memory, which then counts as this process's.

        The call raises OSError if the system has no memory left.
        """
        fd = os.dup(self.fd)  # The arena may be closed meanwhile.
        start = self.header_bytes + slots.start * self.stride_bytes

        def populate() -> None:
            try:
                os.posix_fallocate(fd, start, len(slots) * self.stride_bytes)
            finally:
                os.close(fd)

        return populate

    def close(self) -> None:
        """Give the memory back once no engine maps it. Views of slots keep their mapping alive until they go."""
        os.close(self.fd)
        self._generations.release()
        try:
            self._view.release()
            self._map.close()
        except BufferError:
            pass  # A thread still holds a slot's view. The mapping ends with that view.


def slot_ranges(slots: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield adjacent slots together, as (first, end)."""
    first = end = -1
    for slot in sorted(slots):
        if slot != end:
            if first >= 0:
                yield first, end
            first = slot
        end = slot + 1
    if first >= 0:
        yield first, end


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Return the memory or disk space behind whole pages of a file to the system. They read as zeros afterwards.

    Raises:
        OSError: the system refuses.
    """
    if _libc.fallocate(fd, _PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(length)):
        code = ctypes.get_errno()
        raise OSError(code, f"giving slots of an arena back: {os.strerror(code)}")
