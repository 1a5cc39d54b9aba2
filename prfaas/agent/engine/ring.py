"""The ring: a worker tells its agent which layers lie in their slots, without a message and without waiting.

One producer (the worker) and one consumer (the agent) share a memfd: a 64-byte head of two u64 counters, then
32-byte entries. The producer writes the entry, then the counter, then the eventfd; the consumer reads the eventfd first.
Both counters are stored by one aligned 8-byte write, and the eventfd's system call orders them on every processor.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from enum import IntEnum

HEAD_BYTES = 64
ENTRY_WORDS = 8  # u32: kind, handle, group, layer, first block, number of blocks, then a u64 time in two words
ENTRY_BYTES = ENTRY_WORDS * 4
RING_ENTRIES = 1 << 16  # a 128K prompt of 64 layers in chunks of 2K tokens writes 4,096
_WRITTEN, _READ = 0, 1


class EntryKind(IntEnum):
    LAYER_READY = 1  # `layer` of `group` lies in the slots of blocks [first_block, first_block + num_blocks)
    FORWARD_ENDED = 2  # a forward pass that computed tokens of this transfer has ended; group 1 marks the last one
    REQUEST_ENDED = 3  # this rank writes nothing more for the transfer
    SCHEDULER_BACK = 4  # this rank writes nothing more for what its scheduler asked for before the session `handle`


_KINDS = frozenset(EntryKind)


@dataclass(frozen=True)
class RingEntry:
    """`group` is a position in the transfer's group list; blocks are counted within that entry, `layer` within the group."""

    kind: EntryKind
    handle: int
    group: int = 0
    layer: int = 0
    first_block: int = 0
    num_blocks: int = 0
    time_ns: int = 0  # CLOCK_MONOTONIC of the producer, filled in by `push`


def create_ring() -> tuple[int, int]:
    """A new ring as (memfd, eventfd); the caller owns both."""
    memory = os.memfd_create("prfaas-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, HEAD_BYTES + RING_ENTRIES * ENTRY_BYTES)
    return memory, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


class _Ring:
    def __init__(self, memory_fd: int, event_fd: int) -> None:
        self._map = mmap.mmap(memory_fd, HEAD_BYTES + RING_ENTRIES * ENTRY_BYTES)
        whole = memoryview(self._map)
        self._counters = whole[:HEAD_BYTES].cast("Q")
        self._words = whole[HEAD_BYTES:].cast("I")
        self._memory_fd = memory_fd
        self.event_fd = event_fd

    def close(self) -> None:
        self._counters.release()
        self._words.release()
        self._map.close()
        os.close(self._memory_fd)
        os.close(self.event_fd)


class RingWriter(_Ring):
    """The worker's end; owns both descriptors."""

    def push(self, entry: RingEntry) -> bool:
        """Write one entry and wake the agent; False when the ring is full (the agent is gone or far behind)."""
        written = self._counters[_WRITTEN]
        if written - self._counters[_READ] >= RING_ENTRIES:
            return False
        at = written % RING_ENTRIES * ENTRY_WORDS
        now = time.monotonic_ns()
        words = (entry.kind, entry.handle, entry.group, entry.layer, entry.first_block, entry.num_blocks)
        for offset, word in enumerate((*words, now & 0xFFFFFFFF, now >> 32)):
            self._words[at + offset] = word
        self._counters[_WRITTEN] = written + 1
        os.eventfd_write(self.event_fd, 1)
        return True


class RingReader(_Ring):
    """The agent's end; owns both descriptors. Entries come from another process: their fields are not to be trusted."""

    def drain(self) -> list[RingEntry]:
        """The new entries, oldest first; those of an unknown kind are left out."""
        try:
            os.eventfd_read(self.event_fd)
        except BlockingIOError:
            return []
        read, written = self._counters[_READ], self._counters[_WRITTEN]
        entries = []
        for position in range(max(read, written - RING_ENTRIES), written):
            at = position % RING_ENTRIES * ENTRY_WORDS
            kind, handle, group, layer, first, count, low, high = self._words[at : at + ENTRY_WORDS].tolist()
            if kind in _KINDS:
                entries.append(RingEntry(EntryKind(kind), handle, group, layer, first, count, low | high << 32))
        self._counters[_READ] = written
        return entries
