"""A memory pool above an SSD tier, on a loop that the test turns by hand."""

import mmap
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from prfaas.cachepool.arena import shape_of
from prfaas.cachepool.block_run import BlockIdentity
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.ssd import SsdTier
from prfaas.pool_events import PoolChange, PoolEvent
from prfaas.types import BlockHash
from tests.support.pool_integrity import check_integrity
from tests.support.pool_layouts import ROOT, hybrid

SLOT_BYTES = 20_000
BLOCK_TOKENS = 32
_SSD_STRIDE_BYTES = 20_480
LAYOUT = hybrid(slot_bytes=SLOT_BYTES)
DEADLINE_SECONDS = 30.0
MANY_SLOTS = 100_000  # More than any test writes.


def content_of(block_hash: BlockHash) -> bytes:
    """Return the unique content of the block with this hash."""
    piece = xxhash.xxh3_128_digest(block_hash)
    return (piece * -(-SLOT_BYTES // len(piece)))[:SLOT_BYTES]


class Tier:
    """`turn` runs what the threads have handed over, until something holds."""

    def __init__(
        self, directory: Path, *, memory_slots: int = 16, ssd_slots: int = MANY_SLOTS, **settings: Any
    ) -> None:
        self.events: list[PoolEvent] = []
        self._calls: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
        self.memory = Pool(2 * memory_slots * shape_of(LAYOUT).row_bytes, on_change=self._on_memory)
        self.arena = self.memory.arena(LAYOUT)
        self.ssd = SsdTier(
            directory,
            ssd_slots * _SSD_STRIDE_BYTES,
            self.memory,
            **settings,
            post=lambda function, *arguments: self._calls.put((function, arguments)),
            on_change=self._on_ssd,
        )
        self.ssd.restore(lambda layout: None)

    def _on_memory(self, change: PoolChange) -> None:
        self.ssd.offer(change)

    def _on_ssd(self, change: PoolChange) -> None:
        self.events += change.each()

    def keep(self, hashes: list[BlockHash], *, group: int = 0, parent: BlockHash = ROOT, num_tokens: int = 32) -> None:
        """Put a chain into memory."""
        lease = self.memory.open_lease()
        slots = self.memory.allocate(self.arena, 0, len(hashes), lease)
        assert slots is not None
        for slot, block_hash in zip(slots, hashes, strict=True):
            self.arena.slot_view(slot)[:SLOT_BYTES] = content_of(block_hash)
        self.memory.publish_run(self.arena, slots, group=group, hashes=hashes, parent=parent, num_tokens=num_tokens)
        self.memory.end_lease(lease)

    def ask(self, hashes: list[BlockHash]) -> None:
        """Use what memory holds of a chain."""
        lease = self.memory.open_lease()
        slots = self.memory.find_all(self.arena, 0, hashes)
        self.memory.pin(self.arena, [slot for slot in slots if slot is not None], lease)
        self.memory.end_lease(lease)

    def turn(self, until: Callable[[], bool]) -> None:
        """Run the loop until something holds."""
        self.ssd.pump()
        while not until():
            function, arguments = self._calls.get(timeout=DEADLINE_SECONDS)
            function(*arguments)

    def settle(self) -> None:
        """Write everything that waits."""
        self.turn(self.ssd.is_idle)

    def has(self, block_hash: BlockHash, *, group: int = 0) -> bool:
        return self.ssd.holds(LAYOUT, group, [block_hash])[0]

    def read(self, block_hash: BlockHash, *, group: int = 0) -> bytes | None:
        """The block's bytes; None when it is not there or not whole."""
        into, answers = memoryview(mmap.mmap(-1, self.arena.stride_bytes)), list[bool]()
        block = BlockIdentity(group, block_hash, ROOT, BLOCK_TOKENS, ROOT)
        if not self.ssd.read(LAYOUT, block, into, answers.append):
            return None
        self.turn(lambda: bool(answers))
        return bytes(into[:SLOT_BYTES]) if answers[0] else None

    def close(self) -> None:
        check_integrity(self.ssd.pool)
        check_integrity(self.memory)
        self.ssd.close()
        self.memory.close()
