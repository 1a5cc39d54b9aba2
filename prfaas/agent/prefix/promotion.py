"""Blocks of one layout in memory and on the SSD, and promotion: reading blocks from the SSD into the pool."""

from collections.abc import Callable, Sequence
from typing import Any

from prfaas.agent.transfer.placement import Placement, place
from prfaas.agent.transfer.plan import TransferPlan, is_prefix_block
from prfaas.cachepool.arena import Arena, SlotMemory
from prfaas.cachepool.pool import Pool, SlotPool
from prfaas.cachepool.ssd import SsdTier
from prfaas.types import BlockHash

Done = Callable[[Placement | None], None]


class LocalHoldings:
    """Blocks that this node holds in one arena, in memory or on its SSD."""

    def __init__(self, pool: Pool, ssd: SsdTier | None, arena: Arena) -> None:
        self._pool = pool
        self._ssd = ssd
        self.arena = arena
        ssd_arena = None if ssd is None else ssd.pool.arena_of(arena.layout.fingerprint)
        self._tiers: list[tuple[SlotPool[Any], SlotMemory]] = [(pool, arena)]
        if ssd is not None and ssd_arena is not None:
            self._tiers.append((ssd.pool, ssd_arena))

    def has(self, group: int, block_hash: BlockHash) -> bool:
        """Return whether a block is held."""
        return self.have(group, [block_hash])[0]

    def have(self, group: int, hashes: Sequence[BlockHash]) -> list[bool]:
        """Return for each block whether it is held."""
        in_memory = [slot is not None for slot in self._pool.find_all(self.arena, group, hashes)]
        if self._ssd is None or all(in_memory):
            return in_memory
        on_ssd = self._ssd.holds(self.arena.layout, group, hashes)
        return [memory or ssd for memory, ssd in zip(in_memory, on_ssd, strict=True)]

    def states_after(self, group: int, unit: BlockHash) -> dict[BlockHash, int]:
        """Return the linear states after a hash unit, with their lengths in tokens."""
        return {
            block_hash: length
            for pool, arena in self._tiers
            for block_hash, length in pool.states_after(arena, group, unit).items()
        }


class Promotion:
    """Slots of a plan whose missing blocks are read from the SSD. `done` gets them, or None if a block is lost."""

    def __init__(self, placement: Placement, ssd: SsdTier, done: Done) -> None:
        self._placement = placement
        self._ssd = ssd
        self._done: Done | None = done
        self._missing = [index for index in range(len(placement.slots)) if index not in placement.held]
        self._num_reading = 0
        self._is_complete = True

    def begin(self) -> None:
        """Start to read every missing block."""
        for index in self._missing:
            self._num_reading += 1
            identity = self._placement.identity(index)
            layout, slot = self._placement.arena_of(index).layout, self._placement.whole_slot(index)
            if not is_prefix_block(identity.block_hash) or not self._ssd.read(layout, identity, slot, self._on_read):
                self._num_reading -= 1
                self._is_complete = False
                break
        self._ssd.pump()
        if not self._num_reading:
            self._end()

    def cancel(self) -> None:
        """Drop `done`; the slots are released when reads in progress have ended."""
        self._done = None
        self._ssd.give_up(self._on_read)

    def _on_read(self, is_complete: bool) -> None:
        self._num_reading -= 1
        self._is_complete &= is_complete
        if not self._num_reading:
            self._end()

    def _end(self) -> None:
        if self._is_complete:
            self._placement.publish(self._missing)
        if self._is_complete and self._done is not None:
            self._done(self._placement)
            return
        self._placement.release()
        if self._done is not None:
            self._done(None)


def promote(
    pool: Pool, ssd: SsdTier | None, plan: TransferPlan, arenas: tuple[Arena, ...], *, done: Done
) -> Promotion | None:
    """Return the promotion of a plan's blocks, not begun; None if a block is nowhere or memory is short."""
    if ssd is None:
        return None
    ranks = [LocalHoldings(pool, ssd, arena) for arena in arenas]
    if not all(all(rank.have(blocks.group, blocks.hashes)) for rank in ranks for blocks in plan.groups):
        return None
    placement = place(pool, plan, arenas)
    return None if placement is None else Promotion(placement, ssd, done)
