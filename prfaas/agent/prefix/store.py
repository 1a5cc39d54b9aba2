"""Prefix blocks of the engines on this machine: blocks that they store, look up and read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from prfaas import logs
from prfaas.agent.engine.protocol import Forget, Forgotten, Hold, LookedUp, Lookup, Store, TransferFailed
from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.agent.engine.server import EngineConnection, arenas_of, layouts_of
from prfaas.agent.prefix.lookup import servable_lengths
from prfaas.agent.prefix.promotion import LocalHoldings, Promotion, promote
from prfaas.agent.transfer.placement import LayerProgress, Placement, place
from prfaas.agent.transfer.plan import make_plan
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.ssd import SsdTier
from prfaas.errors import RemoteProtocolError
from prfaas.hashing import HASH_BYTES
from prfaas.types import BlockHash, TransferId

# An engine that waits longer for the SSD computes the blocks itself.
SSD_WAIT_SECONDS = 5.0
_log = logs.get("agent.prefix_store")


@dataclass(eq=False)
class _StoredBlocks:
    """Blocks that an engine is writing for later requests."""

    engine: EngineConnection
    handle: int
    progress: LayerProgress


@dataclass(eq=False)
class _PromotedBlocks:
    """Blocks that an engine waits for while they are read from the SSD."""

    engine: EngineConnection
    promotion: Promotion
    # Monotonic seconds.
    deadline: float


@dataclass(eq=False)
class _ReadBlocks:
    """Blocks that an engine is reading."""

    engine: EngineConnection
    placement: Placement


Use = TypeVar("Use", _StoredBlocks, _PromotedBlocks, _ReadBlocks)


class PrefixStore:
    """Stores, lookups and reads of this node's engines. Runs on the agent's loop."""

    def __init__(self, pool: Pool, handles: Iterator[int], *, ssd: SsdTier | None) -> None:
        """`handles` number the transfers and stores that ring entries name."""
        self._pool = pool
        self._ssd = ssd
        self._handles = handles
        self._stored: dict[TransferId, _StoredBlocks] = {}
        self._by_handle: dict[int, TransferId] = {}
        self._promoted: dict[TransferId, _PromotedBlocks] = {}
        self._read: dict[TransferId, _ReadBlocks] = {}

    def __len__(self) -> int:
        return len(self._stored) + len(self._promoted) + len(self._read)

    def on_message(
        self, engine: EngineConnection, workers: list[EngineConnection], message: Store | Lookup | Hold
    ) -> None:
        """Answer an engine with these ranks."""
        if isinstance(message, Store):
            self._store(engine, workers, message)
        elif isinstance(message, Lookup):
            engine.post(self._look_up(workers, message))
        else:
            self._hold(engine, workers, message)

    def _store(self, engine: EngineConnection, workers: list[EngineConnection], request: Store) -> None:
        """Allocate slots for computed blocks; post SendOpened or TransferFailed."""
        placement = None
        if workers and request.transfer_id not in self._stored:
            try:
                plan = make_plan(layouts_of(workers), request.groups, request.num_tokens)
                placement = place(self._pool, plan, arenas_of(workers), owner=engine.owner)
            except RemoteProtocolError as error:
                _log.warning("store.refused", message=str(error))
        if placement is None:
            engine.post(TransferFailed(request.transfer_id, "no_memory", "no room for these blocks"))
            return
        stored = _StoredBlocks(engine, next(self._handles) & 0xFFFFFFFF, LayerProgress(placement))
        self._stored[request.transfer_id] = stored
        self._by_handle[stored.handle] = request.transfer_id
        engine.post(placement.send_opened(request.transfer_id, stored.handle))

    def on_ring(self, worker: EngineConnection, entry: RingEntry) -> None:
        """Take a worker's ring entry. Entries of other engines' blocks are ignored."""
        if entry.kind is EntryKind.SCHEDULER_REATTACHED:
            orphans = [name for name, stored in self._stored.items() if stored.engine.session < entry.handle]
            for transfer_id in orphans:
                self._rank_done(transfer_id, worker)
            return
        found = self._by_handle.get(entry.handle)
        if found is None or self._stored[found].engine.instance != worker.instance:
            return
        if entry.kind is EntryKind.LAYER_READY:
            self._stored[found].progress.layer_ready(worker.attach.rank, entry)
        elif entry.kind is EntryKind.REQUEST_ENDED:
            self._rank_done(found, worker)

    def _rank_done(self, transfer_id: TransferId, worker: EngineConnection) -> None:
        """Record that a rank writes nothing more, if the blocks are its engine's."""
        stored = self._stored[transfer_id]
        if stored.engine.instance == worker.instance and stored.progress.rank_done(worker.attach.rank):
            self.end(transfer_id, worker.instance)

    def _look_up(self, workers: list[EngineConnection], request: Lookup) -> LookedUp:
        """Return the lengths of a prompt that this node can serve."""
        lengths: list[list[object]] = []
        if workers and len(request.units) % HASH_BYTES == 0:
            starts = range(0, len(request.units), HASH_BYTES)
            path = [request.root, *(BlockHash(request.units[start : start + HASH_BYTES]) for start in starts)]
            ranks = [LocalHoldings(self._pool, self._ssd, arena) for arena in arenas_of(workers)]
            found = servable_lengths(ranks, path, request.limit_tokens)
            lengths = [[length, block_hash] for length, block_hash in found]
        return LookedUp(request.transfer_id, lengths)

    def _hold(self, engine: EngineConnection, workers: list[EngineConnection], request: Hold) -> None:
        """Pin the blocks of one length, from the SSD if needed; post ReceiveReady or TransferFailed."""
        try:
            is_started = self._start_hold(engine, workers, request)
        except RemoteProtocolError as error:
            _log.warning("hold.refused", message=str(error))
            is_started = False
        if not is_started:
            engine.post(TransferFailed(request.transfer_id, "evicted", "a block of this prefix is gone"))

    def _start_hold(self, engine: EngineConnection, workers: list[EngineConnection], request: Hold) -> bool:
        """Return whether all blocks are in memory or are being read."""
        transfer_id = request.transfer_id
        if not workers or transfer_id in self._read or transfer_id in self._promoted:
            return False
        plan, arenas = make_plan(layouts_of(workers), request.groups, request.num_tokens), arenas_of(workers)
        placement = place(self._pool, plan, arenas, owner=engine.owner, may_allocate=False)
        if placement is not None:
            self._hand_out(engine, transfer_id, placement)
            return True
        done = partial(self._hand_out, engine, transfer_id)
        promotion = promote(self._pool, self._ssd, plan, arenas, done=done)
        if promotion is None:
            return False
        self._promoted[transfer_id] = _PromotedBlocks(engine, promotion, time.monotonic() + SSD_WAIT_SECONDS)
        promotion.begin()
        return True

    def _hand_out(self, engine: EngineConnection, transfer_id: TransferId, placement: Placement | None) -> None:
        self._promoted.pop(transfer_id, None)
        if placement is None:
            engine.post(TransferFailed(transfer_id, "evicted", "a block of this prefix is gone"))
        else:
            self._read[transfer_id] = _ReadBlocks(engine, placement)
            engine.post(placement.receive_ready(transfer_id))

    def expire(self, now: float) -> None:
        """Answer engines that have waited too long for the SSD; `now` is monotonic seconds."""
        late = [transfer_id for transfer_id, promoted in self._promoted.items() if now > promoted.deadline]
        for transfer_id in late:
            promoted = self._promoted.pop(transfer_id)
            promoted.promotion.cancel()
            promoted.engine.post(TransferFailed(transfer_id, "evicted", "the SSD did not deliver the blocks in time"))

    def forget(self, engine: EngineConnection, request: Forget) -> None:
        """Drop all blocks of a model, also those being written; post Forgotten."""
        answer = Forgotten(request.transfer_id)
        num_bytes = self._pool.forget(request.model)
        if self._ssd is None:
            engine.post(answer)
        else:
            num_bytes += self._ssd.forget(request.model, partial(engine.post, answer))
        _log.info("pool.model_forgotten", model=request.model, instance=engine.instance, num_bytes=num_bytes)

    def end(self, transfer_id: TransferId, instance: str) -> None:
        """End the instance's use of these blocks, whichever it is."""
        stored = _pop(self._stored, transfer_id, instance)
        if stored is not None:
            del self._by_handle[stored.handle]
            stored.progress.placement.release()
        read = _pop(self._read, transfer_id, instance)
        if read is not None:
            read.placement.release()
        promoted = _pop(self._promoted, transfer_id, instance)
        if promoted is not None:
            promoted.promotion.cancel()

    def engine_lost(self, engine: EngineConnection, *, is_last: bool) -> None:
        """End the reads of a lost connection; a worker that still reads notices the slots' new generations.

        Blocks that workers may write to stay until they report otherwise, or until the last connection is gone.
        """
        ended = [name for name, read in self._read.items() if read.engine is engine]
        ended += [name for name, promoted in self._promoted.items() if promoted.engine is engine]
        for transfer_id in [*ended, *self._stored] if is_last else ended:
            self.end(transfer_id, engine.instance)


def _pop(uses: dict[TransferId, Use], transfer_id: TransferId, instance: str) -> Use | None:
    """Remove and return the use of this name if it is the instance's."""
    use = uses.get(transfer_id)
    return uses.pop(transfer_id) if use is not None and use.engine.instance == instance else None
