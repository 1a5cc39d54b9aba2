"""Prefixes that operators keep in this node's pool or remove from it, by commands of a manager.

A pin is a lease: its blocks never leave. It names a prefix by the hash of its last token, and covers the
blocks in memory at that moment, in all groups and ranks. It ends with an unpin, a removal or the agent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prfaas import logs
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.removal import RunCut, removal
from prfaas.cachepool.slots import LeaseId
from prfaas.cachepool.ssd import SsdTier
from prfaas.types import BlockHash, CopyEnd, CopyOutcome, PoolCommand

_log = logs.get("agent.pins")


class Pins:
    """Pinned prefixes of this node. Runs on the agent's loop."""

    def __init__(self, pool: Pool, ssd: SsdTier | None, *, report: Callable[[CopyEnd], None]) -> None:
        """`report` gets the outcome of each command, also of a repeated one."""
        self._pool = pool
        self._ssd = ssd
        self._report = report
        # Lease and bytes of each pin, by the prefix's last hash.
        self._pinned: dict[BlockHash, tuple[LeaseId, int]] = {}

    def take(self, command: PoolCommand) -> None:
        """Carry out a command and report it. A removal waits until the SSD writes none of its blocks."""
        if command.order == "remove" and self._ssd is not None:
            leaving = {
                block_hash for cut in self._cuts(command.end_hash) for block_hash in cut.run.hashes[cut.num_left :]
            }
            # After the wait, other blocks may be written.
            if not self._ssd.exclude_from_writes(leaving, lambda: self.take(command)):
                return
        self._carry_out(command)

    def _carry_out(self, command: PoolCommand) -> None:
        chains = self._chains(command.end_hash)
        held_bytes = sum(arena.stride_bytes * len(slots) for arena, slots in chains)
        removed_bytes = 0
        self._unpin(command.end_hash)
        if command.order == "pin" and chains:
            self._pin(command.end_hash, chains, held_bytes)
        elif command.order == "remove":
            cuts = self._cuts(command.end_hash)
            removed_bytes = self._pool.cut(cuts) + (0 if self._ssd is None else self._ssd.pool.cut(cuts))
        is_found = bool(held_bytes or removed_bytes or command.order == "unpin")
        outcome: CopyOutcome = "completed" if is_found else "evicted"
        _log.info("pool.order_ended", order=command.order, end_hash=command.end_hash.hex(), outcome=outcome)
        self._report(CopyEnd(command.transfer_id, outcome, "", removed_bytes, held_bytes))

    def drop_absent(self) -> None:
        """End the pins of prefixes that the pool no longer holds."""
        for end_hash in [pin for pin in self._pinned if not self._chains(pin)]:
            self._unpin(end_hash)

    def status(self) -> list[dict[str, Any]]:
        """Return all pins for the status page; callable from any thread."""
        pins = list(self._pinned.items())
        return [{"end_hash": end_hash.hex(), "num_bytes": num_bytes} for end_hash, (_, num_bytes) in pins]

    def _chains(self, end_hash: BlockHash) -> list[tuple[Arena, list[int]]]:
        found = [(arena, self._pool.chain(arena, end_hash)) for arena in self._pool.arenas]
        return [(arena, slots) for arena, slots in found if slots]

    def _pin(self, end_hash: BlockHash, chains: list[tuple[Arena, list[int]]], num_bytes: int) -> None:
        lease = self._pool.open_lease()
        for arena, slots in chains:
            self._pool.pin(arena, slots, lease, is_use=False)
        self._pinned[end_hash] = (lease, num_bytes)

    def _unpin(self, end_hash: BlockHash) -> None:
        lease, _ = self._pinned.pop(end_hash, (None, 0))
        if lease is not None:
            self._pool.end_lease(lease)

    def _cuts(self, end_hash: BlockHash) -> list[RunCut]:
        return removal([*self._pool.tables, *(() if self._ssd is None else self._ssd.pool.tables)], end_hash)
