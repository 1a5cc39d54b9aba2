"""Prefixes that operators want kept in this node's pool, or out of it: a manager's command, carried out at once.

A pin is a lease in the operators' name: its blocks never leave. A soft pin makes them leave after all others; of a prefix
that is pinned it is refused. Both name a prefix by the hash of its last token, hold what of it is in memory at that moment,
in all groups and on all ranks, and end with an unpin, a removal or the agent. What an order finds nothing for ends as
`evicted`; given again it does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prfaas import logs, metrics
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.removal import RunCut, removal
from prfaas.cachepool.slots import LeaseId
from prfaas.cachepool.ssd import SsdTier
from prfaas.types import BlockHash, CopyEnd, CopyOutcome, PoolCommand

OWNER = "operators"
_log = logs.get("agent.pins")


class Pins:
    """What operators have pinned here. Runs on the agent's loop."""

    def __init__(self, pool: Pool, ssd: SsdTier | None, *, report: Callable[[CopyEnd], None]) -> None:
        """`report` hears how each command ended, once for each time that it came."""
        self._pool = pool
        self._ssd = ssd
        self._report = report
        self._pinned: dict[BlockHash, tuple[LeaseId, int]] = {}  # with the bytes
        self._soft: dict[BlockHash, int] = {}

    def take(self, command: PoolCommand) -> None:
        """Carry out a command and report it; a removal once nothing of the prefix is being written to the SSD."""
        if command.order == "remove" and self._ssd is not None:
            leaving = {
                block_hash for cut in self._cuts(command.end_hash) for block_hash in cut.run.hashes[cut.num_left :]
            }
            if not self._ssd.write_none_of(leaving, lambda: self.take(command)):  # by then others may be
                return
        self._carry_out(command)

    def _carry_out(self, command: PoolCommand) -> None:
        if command.order == "soft_pin" and command.end_hash in self._pinned:
            _, held_bytes = self._pinned[command.end_hash]
            self._end(command, "pinned", held_bytes=held_bytes)
            return
        chains = self._chains(command.end_hash)
        held_bytes = sum(arena.stride_bytes * len(slots) for arena, slots in chains)
        removed_bytes = 0
        self._unpin(command.end_hash)
        if command.order == "pin" and chains:
            self._pin(command.end_hash, chains, held_bytes)
        elif command.order == "soft_pin" and chains:
            self._soft[command.end_hash] = held_bytes
            self._soften(command.end_hash, keep=True)
        elif command.order == "remove":
            removed_bytes = self._remove(command.end_hash)
        metrics.POOL_PINNED_BYTES.set(sum(num_bytes for _, num_bytes in self._pinned.values()))
        found = bool(held_bytes or removed_bytes or command.order == "unpin")
        self._end(command, "completed" if found else "evicted", removed_bytes=removed_bytes, held_bytes=held_bytes)

    def _end(self, command: PoolCommand, outcome: CopyOutcome, *, removed_bytes: int = 0, held_bytes: int = 0) -> None:
        _log.info("pool.ordered", order=command.order, end_hash=command.end_hash.hex(), outcome=outcome)
        self._report(CopyEnd(command.command_id, outcome, "", removed_bytes, held_bytes))

    def drop_absent(self) -> None:
        """Pins of what nobody finds here any more end."""
        for end_hash in [its for its in (*self._pinned, *self._soft) if not self._chains(its)]:
            self._unpin(end_hash)
        metrics.POOL_PINNED_BYTES.set(sum(num_bytes for _, num_bytes in self._pinned.values()))

    def status(self) -> list[dict[str, Any]]:
        """What is pinned, for the status page; from any thread."""
        pins = [(end_hash, "pin", num_bytes) for end_hash, (_, num_bytes) in list(self._pinned.items())]
        pins += [(end_hash, "soft_pin", num_bytes) for end_hash, num_bytes in list(self._soft.items())]
        return [{"end_hash": its.hex(), "order": order, "num_bytes": num_bytes} for its, order, num_bytes in pins]

    def _chains(self, end_hash: BlockHash) -> list[tuple[Arena, list[int]]]:
        found = [(arena, self._pool.chain(arena, end_hash)) for arena in self._pool.arenas]
        return [(arena, slots) for arena, slots in found if slots]

    def _pin(self, end_hash: BlockHash, chains: list[tuple[Arena, list[int]]], num_bytes: int) -> None:
        lease = self._pool.open_lease(OWNER)
        for arena, slots in chains:
            self._pool.pin(arena, slots, lease, is_use=False)
        self._pinned[end_hash] = (lease, num_bytes)

    def _unpin(self, end_hash: BlockHash) -> None:
        lease, _ = self._pinned.pop(end_hash, (None, 0))
        if lease is not None:
            self._pool.end_lease(lease)
        if self._soft.pop(end_hash, None) is not None:
            self._soften(end_hash, keep=False)
            for other in self._soft:  # which may share blocks with it
                self._soften(other, keep=True)

    def _soften(self, end_hash: BlockHash, *, keep: bool) -> None:
        for arena, slots in self._chains(end_hash):
            self._pool.soft_pin(arena, slots, keep=keep)

    def _cuts(self, end_hash: BlockHash) -> list[RunCut]:
        return removal([*self._pool.tables, *(() if self._ssd is None else self._ssd.tables)], end_hash)

    def _remove(self, end_hash: BlockHash) -> int:
        """Bytes that left, on the SSD too."""
        cuts = self._cuts(end_hash)
        return self._pool.cut(cuts) + (0 if self._ssd is None else self._ssd.cut(cuts))
