"""Shared-memory ring in which a worker reports finished layers to its agent.

The ring has one producer (the worker) and one consumer (the agent), and neither waits for the other.
A memfd holds a 64-byte head with two u64 counters, then 32-byte entries. The producer writes the entry, then the
counter, then the eventfd; the consumer reads the eventfd first. Each counter is one aligned 8-byte write, and the
eventfd's system call orders all writes on every processor.
"""

import mmap
import os
import time
from dataclasses import dataclass
from enum import IntEnum

HEAD_BYTES = 64
ENTRY_WORDS = 8  # u32: kind, handle, group, layer, first block, number of blocks, then a u64 time in two words
ENTRY_BYTES = ENTRY_WORDS * 4
# A 128K prompt of 64 layers in chunks of 2K tokens writes 4,096 entries.
RING_ENTRIES = 1 << 16
_WRITTEN, _READ = 0, 1


class EntryKind(IntEnum):
    """Kind of a ring entry, as its first word on the ring."""

    # `layer` of `group` lies in the slots of blocks [first_block, first_block + num_blocks).
    LAYER_READY = 1
    # A forward pass that computed tokens of this transfer has ended; group 1 marks the last pass.
    FORWARD_ENDED = 2
    # This rank writes nothing more for the transfer.
    REQUEST_ENDED = 3
    # This rank writes nothing more for requests of scheduler sessions before the session `handle`.
    SCHEDULER_REATTACHED = 4


_KINDS = frozenset(EntryKind)


@dataclass(frozen=True)
class RingEntry:
    """One entry of the ring.

    `group` is a position in the transfer's group list. Blocks count within that group entry, `layer` within the group.
    """

    kind: EntryKind
    handle: int
    group: int = 0
    layer: int = 0
    first_block: int = 0
    num_blocks: int = 0
    time_ns: int = 0  # CLOCK_MONOTONIC of the producer, filled in by `push`


def create_ring() -> tuple[int, int]:
    """Create a ring and return its memfd and eventfd; the caller owns both."""
    memory = os.memfd_create("prfaas-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, HEAD_BYTES + RING_ENTRIES * ENTRY_BYTES)
    return memory, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


class _Ring:
    """One end of a ring; owns both descriptors."""

    def __init__(self, memory_fd: int, event_fd: int) -> None:
        self._map = mmap.mmap(memory_fd, HEAD_BYTES + RING_ENTRIES * ENTRY_BYTES)
        view = memoryview(self._map)
        self._counters = view[:HEAD_BYTES].cast("Q")
        self._words = view[HEAD_BYTES:].cast("I")
        self._memory_fd = memory_fd
        self.event_fd = event_fd

    def close(self) -> None:
        """Unmap the ring and close both descriptors."""
        self._counters.release()
        self._words.release()
        self._map.close()
        os.close(self._memory_fd)
        os.close(self.event_fd)


class RingWriter(_Ring):
    """Worker's end of a ring."""

    def push(self, entry: RingEntry) -> bool:
        """Write one entry and wake the agent; return False when the ring is full."""
        written = self._counters[_WRITTEN]
        if written - self._counters[_READ] >= RING_ENTRIES:
            return False
        start = written % RING_ENTRIES * ENTRY_WORDS
        now = time.monotonic_ns()
        words = (entry.kind, entry.handle, entry.group, entry.layer, entry.first_block, entry.num_blocks)
        for offset, word in enumerate((*words, now & 0xFFFFFFFF, now >> 32)):
            self._words[start + offset] = word
        self._counters[_WRITTEN] = written + 1
        os.eventfd_write(self.event_fd, 1)
        return True


class RingReader(_Ring):
    """Agent's end of a ring. Another process writes the entries, so their fields are untrusted."""

    def drain(self) -> list[RingEntry]:
        """Return the new entries, oldest first, without those of an unknown kind."""
        try:
            os.eventfd_read(self.event_fd)
        except BlockingIOError:
            return []
        read, written = self._counters[_READ], self._counters[_WRITTEN]
        entries = []
        for position in range(max(read, written - RING_ENTRIES), written):
            start = position % RING_ENTRIES * ENTRY_WORDS
            kind, handle, group, layer, first, count, low, high = self._words[start : start + ENTRY_WORDS].tolist()
            if kind in _KINDS:
                entries.append(RingEntry(EntryKind(kind), handle, group, layer, first, count, low | high << 32))
        self._counters[_READ] = written
        return entries
