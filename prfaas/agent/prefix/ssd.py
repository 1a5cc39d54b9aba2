"""Prefix blocks that an engine is to load and that lie on the SSD alone: read into the pool first."""

from __future__ import annotations

from collections.abc import Callable

from prfaas.agent.transfer.placement import Placement, place
from prfaas.agent.transfer.plan import TransferPlan, is_prefix_block
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.ssd import SsdTier

OWNER = "ssd"  # of the slots: threads write to them, whatever becomes of the engine
Done = Callable[[Placement | None], None]


class Promotion:
    """One placement whose absent blocks come from the SSD. `done` hears of it once, unless it was cancelled."""

    def __init__(self, placement: Placement, ssd: SsdTier, done: Done) -> None:
        self.placement = placement
        self._ssd = ssd
        self._done: Done | None = done
        self._absent = [index for index in range(len(placement.slots)) if index not in placement.held]
        self._num_unread = 0
        self._is_whole = True

    def begin(self) -> None:
        """Ask for every absent block."""
        for index in self._absent:
            self._num_unread += 1
            identity = self.placement.identity(index)
            layout = self.placement.arenas[self.placement.run_of(index).rank].layout
            asked = is_prefix_block(identity.block_hash) and self._ssd.read(
                layout, identity, self.placement.whole_slot(index), self._was_read
            )
            if not asked:
                self._num_unread -= 1
                self._is_whole = False
                break
        self._ssd.pump()
        if not self._num_unread:
            self._end()

    def cancel(self) -> None:
        """Nobody waits any more; the slots are released when the reads that have begun have ended."""
        self._done = None
        self._ssd.give_up(self._was_read)

    def _was_read(self, is_whole: bool) -> None:
        self._num_unread -= 1
        self._is_whole &= is_whole
        if not self._num_unread:
            self._end()

    def _end(self) -> None:
        if self._is_whole:
            self.placement.publish(self._absent)
        if self._is_whole and self._done is not None:
            self._done(self.placement)
            return
        self.placement.release()
        if self._done is not None:
            self._done(None)


def promote(pool: Pool, ssd: SsdTier, plan: TransferPlan, arenas: tuple[Arena, ...], *, done: Done) -> Promotion | None:
    """What brings a plan's blocks into the pool once it begins, or None when there is no memory for them.

    `done` hears the placement, or None when a block is nowhere or not whole.
    """
    placement = place(pool, plan, arenas, owner=OWNER)
    return None if placement is None else Promotion(placement, ssd, done)
