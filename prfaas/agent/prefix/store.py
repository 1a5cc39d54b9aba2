"""Prefix blocks for the engines beside this agent: what they leave behind, what they may take up again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from prfaas import logs
from prfaas.agent.engine.protocol import (
    HELD,
    Forget,
    Forgotten,
    Hold,
    LookedUp,
    Lookup,
    ReceiveReady,
    SendOpened,
    Store,
    TransferFailed,
)
from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.agent.engine.server import EngineConnection
from prfaas.agent.prefix.lookup import LocalHoldings, servable_lengths, tokens_by_kind
from prfaas.agent.prefix.ssd import Promotion, promote
from prfaas.agent.transfer.layer_progress import LayerProgress
from prfaas.agent.transfer.placement import Placement, place, place_held
from prfaas.agent.transfer.plan import TransferPlan, make_plan
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.ssd import SsdTier
from prfaas.errors import RemoteProtocolError
from prfaas.hashing import HASH_BYTES
from prfaas.kv.layout import Layout
from prfaas.types import BlockHash, TransferId

_log = logs.get("agent.keeping")


@dataclass(eq=False)
class Stored:
    """Blocks that an engine is filling for later requests."""

    engine: EngineConnection
    handle: int
    filling: LayerProgress


@dataclass(eq=False)
class Waiting:
    """An engine waits for blocks that are read from the SSD."""

    engine: EngineConnection
    promotion: Promotion
    until: float  # monotonic seconds


@dataclass(eq=False)
class Reading:
    """Prefix blocks that an engine is loading."""

    engine: EngineConnection
    placement: Placement


Use = TypeVar("Use", Stored, Waiting, Reading)


class PrefixStore:
    """Stores and lookups of this node's engines. Runs on the agent's loop."""

    def __init__(self, pool: Pool, handles: Iterator[int], *, ssd: SsdTier | None, ssd_wait_seconds: float) -> None:
        """`handles` number what the rings speak of, together with the transfers that leave."""
        self._pool = pool
        self._ssd = ssd
        self._ssd_wait_seconds = ssd_wait_seconds
        self._waiting: dict[TransferId, Waiting] = {}
        self._handles = handles
        self._stored: dict[TransferId, Stored] = {}
        self._by_handle: dict[int, TransferId] = {}
        self._reading: dict[TransferId, Reading] = {}

    def __len__(self) -> int:
        return len(self._stored) + len(self._reading) + len(self._waiting)

    def on_message(
        self, engine: EngineConnection, workers: list[EngineConnection], message: Store | Lookup | Hold
    ) -> None:
        """Answer an engine whose ranks these workers are."""
        if isinstance(message, Store):
            self.store(engine, workers, message)
        elif isinstance(message, Lookup):
            self.lookup(engine, workers, message)
        else:
            self.hold(engine, workers, message)

    # Storing

    def store(self, engine: EngineConnection, workers: list[EngineConnection], request: Store) -> None:
        """Grant slots for computed blocks; the engine hears SendOpened or TransferFailed."""
        placement = self._place(engine, workers, request)
        if placement is None:
            engine.post(TransferFailed(request.transfer_id, "no_memory", "no room for these blocks"))
            return
        stored = Stored(engine, next(self._handles) & 0xFFFFFFFF, LayerProgress(placement))
        self._stored[request.transfer_id] = stored
        self._by_handle[stored.handle] = request.transfer_id
        copies = [HELD if index in placement.held else slot for index, slot in enumerate(placement.slots)]
        engine.post(SendOpened(request.transfer_id, stored.handle, placement.plan.nested(copies)))

    def _place(self, engine: EngineConnection, workers: list[EngineConnection], request: Store) -> Placement | None:
        if not workers or request.transfer_id in self._stored:
            return None
        try:
            plan = make_plan(_layouts(workers), request.groups, request.num_tokens)
        except RemoteProtocolError as error:
            _log.warning("store.refused", message=str(error))
            return None
        return place(self._pool, plan, _arenas(workers), owner=engine.owner)

    def on_ring(self, worker: EngineConnection, entry: RingEntry) -> None:
        """A worker has filled one layer of some blocks, or writes nothing more for them."""
        if entry.kind is EntryKind.SCHEDULER_BACK:
            for orphan in [name for name, its in self._stored.items() if its.engine.session < entry.handle]:
                self._rank_done(orphan, worker)
            return
        transfer_id = self._by_handle.get(entry.handle)
        stored = self._stored.get(transfer_id) if transfer_id is not None else None
        if stored is None or transfer_id is None or stored.engine.attach.instance != worker.attach.instance:
            return
        if entry.kind is EntryKind.LAYER_READY:
            stored.filling.layer_ready(worker.attach.rank, entry)
        elif entry.kind is EntryKind.REQUEST_ENDED:
            self._rank_done(transfer_id, worker)

    def _rank_done(self, transfer_id: TransferId, worker: EngineConnection) -> None:
        """A rank writes nothing more to these blocks, where they are its engine's."""
        stored = self._stored[transfer_id]
        if stored.engine.attach.instance == worker.attach.instance and stored.filling.rank_done(worker.attach.rank):
            self.end(transfer_id, worker.attach.instance)

    # Looking up

    def lookup(self, engine: EngineConnection, workers: list[EngineConnection], request: Lookup) -> None:
        """Say which lengths of a prompt this pool can serve; the engine hears LookedUp, at once."""
        lengths: list[list[object]] = []
        held_tokens = None
        if workers and len(request.units) % HASH_BYTES == 0:
            path = [request.root, *_split(request.units)]
            nodes = [LocalHoldings(self._pool, self._ssd, arena) for arena in _arenas(workers)]
            found = servable_lengths(nodes, path, request.limit_tokens)
            lengths = [[length, block_hash] for length, block_hash in found]
            if max([length for length, _ in found], default=0) < request.promised_tokens:
                by_rank = [tokens_by_kind(held, path, request.promised_tokens) for held in nodes]
                held_tokens = [[kind, min(its[kind] for its in by_rank)] for kind in by_rank[0]]
        engine.post(LookedUp(request.transfer_id, lengths, held_tokens))

    def hold(self, engine: EngineConnection, workers: list[EngineConnection], request: Hold) -> None:
        """Pin the blocks of one length; the engine hears ReceiveReady or TransferFailed."""
        placement, plan = None, self._plan_of(workers, request)
        if plan is not None:
            placement = place_held(self._pool, plan, _arenas(workers), owner=engine.owner)
        if placement is not None:
            self._hand_out(engine, request.transfer_id, placement)
        elif (
            plan is None or self._ssd is None or not self._promote(engine, request.transfer_id, plan, _arenas(workers))
        ):
            engine.post(TransferFailed(request.transfer_id, "evicted", "a block of this prefix is gone"))

    def _plan_of(self, workers: list[EngineConnection], request: Hold) -> TransferPlan | None:
        known = request.transfer_id in self._reading or request.transfer_id in self._waiting
        try:
            return None if known or not workers else make_plan(_layouts(workers), request.groups, request.num_tokens)
        except RemoteProtocolError as error:
            _log.warning("hold.refused", message=str(error))
            return None

    def _hand_out(self, engine: EngineConnection, transfer_id: TransferId, placement: Placement) -> None:
        self._reading[transfer_id] = Reading(engine, placement)
        slots, generations = (
            placement.plan.nested(list(placement.slots)),
            placement.plan.nested(placement.generations()),
        )
        engine.post(ReceiveReady(transfer_id, slots, generations))

    def forget(self, engine: EngineConnection, request: Forget) -> None:
        """Nobody finds what is here of a model any more, nor what is being filled; the engine hears Forgotten."""
        answer = Forgotten(request.transfer_id)
        num_bytes = self._pool.forget(request.model)
        if self._ssd is None:
            engine.post(answer)
        else:
            num_bytes += self._ssd.forget(request.model, partial(engine.post, answer))
        _log.info("pool.forgotten", model=request.model, instance=engine.attach.instance, num_bytes=num_bytes)

    # From the SSD

    def _promote(
        self, engine: EngineConnection, transfer_id: TransferId, plan: TransferPlan, arenas: tuple[Arena, ...]
    ) -> bool:
        """Have the blocks read from the SSD; False when there is no memory for them."""
        assert self._ssd is not None

        def done(placement: Placement | None) -> None:
            self._waiting.pop(transfer_id, None)
            if placement is not None:
                self._hand_out(engine, transfer_id, placement)
            else:
                engine.post(TransferFailed(transfer_id, "evicted", "a block of this prefix is gone"))

        promotion = promote(self._pool, self._ssd, plan, arenas, done=done)
        if promotion is not None:
            until = time.monotonic() + self._ssd_wait_seconds
            self._waiting[transfer_id] = Waiting(engine, promotion, until)
            promotion.begin()
        return promotion is not None

    def expire(self, now: float) -> None:
        """Engines wait for the SSD no longer than they may."""
        late = [transfer_id for transfer_id, its in self._waiting.items() if now > its.until]
        for transfer_id in late:
            its = self._waiting.pop(transfer_id)
            its.promotion.cancel()
            its.engine.post(
                TransferFailed(transfer_id, "evicted", "the SSD is slow: blocks of this prefix are not here")
            )

    # Ending

    def end(self, transfer_id: TransferId, instance: str) -> None:
        """The engine neither fills nor reads these slots any more, where they are its own."""
        stored = _taken(self._stored, transfer_id, instance)
        if stored is not None:
            del self._by_handle[stored.handle]
            stored.filling.placement.release()
        reading = _taken(self._reading, transfer_id, instance)
        if reading is not None:
            reading.placement.release()
        waiting = _taken(self._waiting, transfer_id, instance)
        if waiting is not None:
            waiting.promotion.cancel()

    def engine_lost(self, engine: EngineConnection, *, entirely: bool) -> None:
        """A process of an engine is gone, and with it what it asked to read: a worker that still does finds out by the slots'
        generations. What workers may still write to stays until they say so, or the engine is `entirely` gone."""
        ended = [name for name, its in self._reading.items() if its.engine is engine]
        ended += [name for name, its in self._waiting.items() if its.engine is engine]
        for transfer_id in [*ended, *self._stored] if entirely else ended:
            self.end(transfer_id, engine.attach.instance)


def _taken(uses: dict[TransferId, Use], transfer_id: TransferId, instance: str) -> Use | None:
    """The use of this name, out of its table, where it is this instance's."""
    use = uses.get(transfer_id)
    return uses.pop(transfer_id) if use is not None and use.engine.attach.instance == instance else None


def _layouts(workers: list[EngineConnection]) -> tuple[Layout, ...]:
    return tuple(worker.layout for worker in workers if worker.layout is not None)


def _arenas(workers: list[EngineConnection]) -> tuple[Arena, ...]:
    return tuple(worker.arena for worker in workers if worker.arena is not None)


def _split(units: bytes) -> list[BlockHash]:
    return [BlockHash(units[start : start + HASH_BYTES]) for start in range(0, len(units), HASH_BYTES)]
