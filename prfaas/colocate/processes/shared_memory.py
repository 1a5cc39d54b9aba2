"""The two sides of the executor."""

from __future__ import annotations

import mmap
import os
from enum import IntEnum
from typing import Literal

Side = Literal["prefill", "decode"]
SIDES: tuple[Side, Side] = ("prefill", "decode")


BOARD_BYTES = 4096
FULL_SHARE = 10_000  # Shares are in ten-thousandths.


class Word(IntEnum):
    """Decode writes all but PREFILL_BUSY and PREFILL_STEPS, which are prefill's."""

    DECODE_BATCH = 0
    DECODE_STEPS = 1
    DECODE_SHARE = 2
    PREFILL_SHARE = 3  # Share of a prefill that starts now.
    SHARE_CHANGES = 4
    FREE_BLOCKS = 5
    SURPLUS_TOKENS = 6
    PREEMPTIONS = 7
    PREFILL_BUSY = 8
    PREFILL_STEPS = 9
    PENDING_KV = 10  # From here on: number of requests in each state.
    WAITING_LOAD = 11
    WAITING_PREFILL = 12
    PREFILL_FINISHED = 13
    RUNNING = 14


class Board:
    """One process's view; takes `memory_fd` over."""

    def __init__(self, memory_fd: int) -> None:
        self._map = mmap.mmap(memory_fd, BOARD_BYTES)
        self._words = memoryview(self._map).cast("Q")
        os.close(memory_fd)

    def __getitem__(self, word: Word) -> int:
        return self._words[word]

    def __setitem__(self, word: Word, value: int) -> None:
        self._words[word] = value

    def add(self, word: Word, number: int = 1) -> None:
        self._words[word] += number

    def share(self, word: Word) -> float:
        return self._words[word] / FULL_SHARE

    def close(self) -> None:
        self._words.release()
        self._map.close()


def create() -> int:
    """Return a new board's memfd, all words zero but the prefill's share, which is all; the caller owns it."""
    memory = os.memfd_create("prfaas-colocate-board", os.MFD_CLOEXEC)
    os.ftruncate(memory, BOARD_BYTES)
    os.pwrite(memory, FULL_SHARE.to_bytes(8, "little"), Word.PREFILL_SHARE * 8)
    return memory
