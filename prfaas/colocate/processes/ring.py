"""A lock-free ring of word records between two processes: one producer, one consumer, both never wait for the other.

A memfd holds two u64 counters (words written, words read), then 32-bit words. A record is its length, its kind and its
words. The producer writes the record, then the counter by one aligned store, then wakes the consumer's eventfd; the
system call orders both on every processor. A producer that dies inside a record leaves no trace: the counter was not moved.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections import deque
from collections.abc import Sequence

HEAD_BYTES = 64
RING_WORDS = 1 << 20  # 4 MiB, so two prompts of 512K tokens; untouched pages take no memory
_WRITTEN, _READ = 0, 1

Record = tuple[int, list[int]]


def create() -> int:
    """Return a new ring's memfd; the caller owns it."""
    memory = os.memfd_create("prfaas-colocate-ring", os.MFD_CLOEXEC)
    os.ftruncate(memory, HEAD_BYTES + RING_WORDS * 4)
    return memory


class _Ring:
    def __init__(self, memory_fd: int) -> None:
        self._map = mmap.mmap(memory_fd, HEAD_BYTES + RING_WORDS * 4)
        whole = memoryview(self._map)
        self._counters = whole[:HEAD_BYTES].cast("Q")
        self._words = whole[HEAD_BYTES:].cast("I")
        os.close(memory_fd)

    def close(self) -> None:
        self._counters.release()
        self._words.release()
        self._map.close()


class RingWriter(_Ring):
    """The producer's end; takes `memory_fd` over. `event_fd` wakes the consumer and stays the caller's."""

    def __init__(self, memory_fd: int, event_fd: int) -> None:
        super().__init__(memory_fd)
        self._event_fd = event_fd
        self._backlog: deque[array[int]] = deque()

    def push(self, kind: int, words: Sequence[int]) -> None:
        """Hand over one record, in order; what does not fit yet waits here for `flush`."""
        self._backlog.append(array("I", (len(words) + 2, kind, *words)))
        self.flush()

    def flush(self) -> bool:
        """Write what fits; whether nothing is left."""
        moved = False
        while self._backlog and self._write(self._backlog[0]):
            self._backlog.popleft()
            moved = True
        if moved:
            os.eventfd_write(self._event_fd, 1)
        return not self._backlog

    def _write(self, record: array[int]) -> bool:
        written = self._counters[_WRITTEN]
        if RING_WORDS - (written - self._counters[_READ]) < len(record):
            return False
        at = written % RING_WORDS
        first = min(len(record), RING_WORDS - at)
        with memoryview(record) as source:
            self._words[at : at + first] = source[:first]
            self._words[: len(record) - first] = source[first:]
        self._counters[_WRITTEN] = written + len(record)
        return True


class RingReader(_Ring):
    """The consumer's end; takes `memory_fd` over."""

    def drain(self) -> list[Record]:
        """Return the new records as (kind, words), oldest first."""
        read, written = self._counters[_READ], self._counters[_WRITTEN]
        records = []
        while read < written:
            length = self._words[read % RING_WORDS]
            kind, *words = self._slice(read + 1, length - 1)
            records.append((kind, words))
            read += length
        self._counters[_READ] = read
        return records

    def _slice(self, start: int, length: int) -> list[int]:
        at = start % RING_WORDS
        first = min(length, RING_WORDS - at)
        return self._words[at : at + first].tolist() + self._words[: length - first].tolist()


def clear_wakeups(event_fd: int) -> None:
    """Take the wake-ups that have come; never blocks on an eventfd made non-blocking."""
    try:
        os.eventfd_read(event_fd)
    except BlockingIOError:
        pass
