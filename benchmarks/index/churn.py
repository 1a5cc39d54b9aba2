"""An index of a million blocks while 100,000 blocks a second come and as many go: memory, runs, and stalls of the loop."""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

from benchmarks.index.deployment import BLOCKS_PER_PROMPT, announcements, layout, node, prompt
from benchmarks.index.in_process import resident_bytes
from prfaas.cli.startup import return_large_blocks
from prfaas.index.memory.index import Index
from prfaas.index.segments import CELL_BLOCKS, TAIL_BYTES, Announcement, Holding, Segment
from prfaas.types import BlockHash

TICK_SECONDS = 0.25
SWEPT_RUNS_PER_TICK = 1000
BLOCKS_PER_BATCH = 1000  # As an agent sends them within about 10 ms.
COMMON_BLOCKS = 12  # A system prompt that all chats share.
BLOCKS_PER_CHAT = 20  # Own blocks, in the cell of the shared ones.

Piece = tuple[Announcement, ...]
_LAYOUT = layout(hybrid=False)
_BLOCKS = Holding(_LAYOUT.fingerprint, 0, "memory")


def measure(*, num_blocks: int, blocks_per_second: int, seconds: float, shares_cell: bool) -> dict[str, Any]:
    """Fill an index, then replace its oldest blocks at the given rate. Stalls are this thread's own time.

    Dictionaries that lose and gain entries grow once to about three times their entries. So the growth in the second
    half of the time tells whether anything stays behind.
    """
    return_large_blocks()  # As in a manager.
    index, name = Index(), node(0, _LAYOUT).name
    index.register(name, cluster=node(0, _LAYOUT).cluster, epoch=1, layouts=[_LAYOUT])
    make = _Chats().next if shares_cell else _whole_prompt
    held, size = deque[Piece](), 0
    while size < num_blocks:
        held.append(make())
        index.apply(name, held[-1])
        size += _num_blocks(held[-1])
    before, runs_before = resident_bytes(), index.num_runs()
    stalls, began, moved = array("d"), time.monotonic(), 0
    next_sweep = due = began
    middle_bytes = middle_moved = 0
    while time.monotonic() < began + seconds:
        if not middle_moved and time.monotonic() >= began + seconds / 2:
            middle_bytes, middle_moved = resident_bytes(), moved
        stalls.append(_timed(lambda: _replace(index, name, held, make)))
        moved += BLOCKS_PER_BATCH
        if time.monotonic() >= next_sweep:
            next_sweep += TICK_SECONDS
            stalls.append(_timed(lambda: index.sweep(SWEPT_RUNS_PER_TICK)))
        due += BLOCKS_PER_BATCH / blocks_per_second
        time.sleep(max(0.0, due - time.monotonic()))
    after, ordered = resident_bytes(), sorted(stalls)
    return {
        "blocks": index.num_blocks(),
        "shares_cell": shares_cell,
        "blocks_per_second": round(moved / seconds),
        "runs_before": runs_before,
        "runs_after": index.num_runs(),
        "megabytes_before": round(before / 1e6, 1),
        "megabytes_after": round(after / 1e6, 1),
        "bytes_grown_per_block_moved_in_second_half": round((after - middle_bytes) / (moved - middle_moved), 3),
        "stall_p99_milliseconds": round(ordered[round(len(ordered) * 0.99) - 1] * 1e3, 2),
        "stall_worst_milliseconds": round(ordered[-1] * 1e3, 2),
    }


def _timed(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def _replace(index: Index, name: Any, held: deque[Piece], make: Callable[[], Piece]) -> None:
    """Announce as many new blocks as a batch has, and remove as many old ones."""
    moved = 0
    while moved < BLOCKS_PER_BATCH:
        gone, new = held.popleft(), make()
        index.apply(name, [_removed(announcement) for announcement in gone])
        index.apply(name, new)
        held.append(new)
        moved += _num_blocks(new)


def _removed(announcement: Announcement) -> Announcement:
    assert isinstance(announcement, Segment)
    return Segment(announcement.holding, announcement.head, announcement.tails, announcement.bitmap, stored=False)


def _num_blocks(piece: Piece) -> int:
    return sum(announcement.bitmap.bit_count() for announcement in piece if isinstance(announcement, Segment))


def _whole_prompt() -> Piece:
    return tuple(announcements(prompt(), BLOCKS_PER_PROMPT // 4, _LAYOUT))


class _Chats:
    """Chats that share the first blocks of one cell."""

    def __init__(self) -> None:
        self._common = os.urandom(COMMON_BLOCKS * TAIL_BYTES)
        self._head = BlockHash(self._common[:TAIL_BYTES] + os.urandom(TAIL_BYTES))

    def next(self) -> Piece:
        assert COMMON_BLOCKS + BLOCKS_PER_CHAT <= CELL_BLOCKS
        own = (1 << BLOCKS_PER_CHAT) - 1 << COMMON_BLOCKS
        tails = self._common + os.urandom(BLOCKS_PER_CHAT * TAIL_BYTES)
        return (Segment(_BLOCKS, self._head, tails, own, stored=True),)
