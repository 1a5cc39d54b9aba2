"""The arena: equal slots for the blocks of one layout, in shared memory that engines map."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from prfaas.cachepool.layout import Layout

PAGE_BYTES = mmap.PAGESIZE
SLOT_ALIGNMENT_BYTES = 64  # a cache line
_GENERATION_BYTES = 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)


def stride_of(layout: Layout) -> int:
    """Distance between two slots of this layout's arena."""
    return -(-layout.slot_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


class Arena:
    """A sealed memfd: a table of one u64 generation per slot, then the slots. Memory is touched when it is used."""

    def __init__(self, layout: Layout, num_slots: int) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self.stride_bytes = stride_of(layout)
        self.header_bytes = -(-num_slots * _GENERATION_BYTES // PAGE_BYTES) * PAGE_BYTES
        size = self.header_bytes + num_slots * self.stride_bytes
        self.fd = os.memfd_create("prfaas-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._map = mmap.mmap(self.fd, size)
        self._view = memoryview(self._map)
        self._generations = self._view[: num_slots * _GENERATION_BYTES].cast("Q")

    def slot_view(self, slot: int) -> memoryview:
        """The bytes of a slot, padding included; valid until `close`."""
        start = self.header_bytes + slot * self.stride_bytes
        return self._view[start : start + self.stride_bytes]

    def generation(self, slot: int) -> int:
        return self._generations[slot]

    def bump(self, slot: int) -> None:
        """Say to every reader that the slot is another block's from here on."""
        self._generations[slot] += 1

    def close(self) -> None:
        """Give the memory back once no engine maps it; views of slots keep their mapping alive until they go."""
        os.close(self.fd)
        self._generations.release()
        try:
            self._view.release()
            self._map.close()
        except BufferError:
            pass  # a thread still holds a slot's view: the mapping ends with it

    def __repr__(self) -> str:
        return f"<Arena {self.layout.model} rank={self.layout.shard.rank} slots={self.num_slots}x{self.stride_bytes}>"
