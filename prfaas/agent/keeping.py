"""Prefix blocks for the engines beside this agent: what they leave behind, what they may take up again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prfaas import logs
from prfaas.agent.engines import EngineConnection
from prfaas.agent.filling import Filling
from prfaas.agent.placement import Placement, place, place_held
from prfaas.agent.plan import make_plan
from prfaas.agent.protocol import HELD, Hold, LookedUp, Lookup, ReceiveReady, SendOpened, Store, TransferFailed
from prfaas.agent.ring import EntryKind, RingEntry
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.layout import Layout
from prfaas.cachepool.pool import Pool
from prfaas.errors import RemoteProtocolError
from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS
from prfaas.index.usable import GroupShape, Held, usable_prefix
from prfaas.types import BlockHash, TransferId

MAX_CANDIDATES = 8
_log = logs.get("agent.keeping")


@dataclass(eq=False)
class Stored:
    """Blocks that an engine is filling for later requests."""

    engine: EngineConnection
    handle: int
    filling: Filling


@dataclass(eq=False)
class Reading:
    """Prefix blocks that an engine is loading."""

    engine: EngineConnection
    placement: Placement


class Keeping:
    """Stores and lookups of this node's engines. Runs on the agent's loop."""

    def __init__(self, pool: Pool, handles: Iterator[int]) -> None:
        """`handles` number what the rings speak of, together with the transfers that leave."""
        self._pool = pool
        self._handles = handles
        self._stored: dict[TransferId, Stored] = {}
        self._by_handle: dict[int, TransferId] = {}
        self._reading: dict[TransferId, Reading] = {}

    def __len__(self) -> int:
        return len(self._stored) + len(self._reading)

    # Storing

    def store(self, engine: EngineConnection, workers: list[EngineConnection], request: Store) -> None:
        """Grant slots for computed blocks; the engine hears SendOpened or TransferFailed."""
        placement = self._place(engine, workers, request)
        if placement is None:
            engine.post(TransferFailed(request.transfer_id, "no_memory", "no room for these blocks"))
            return
        stored = Stored(engine, next(self._handles) & 0xFFFFFFFF, Filling(placement))
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
        transfer_id = self._by_handle.get(entry.handle)
        stored = self._stored.get(transfer_id) if transfer_id is not None else None
        if stored is None or transfer_id is None or stored.engine.attach.instance != worker.attach.instance:
            return
        if entry.kind is EntryKind.LAYER_READY:
            stored.filling.layer_ready(worker.attach.rank, entry)
        elif entry.kind is EntryKind.REQUEST_ENDED and stored.filling.rank_done(worker.attach.rank):
            self.end(transfer_id)

    # Looking up

    def lookup(self, engine: EngineConnection, workers: list[EngineConnection], request: Lookup) -> None:
        """Say which lengths of a prompt this pool can serve; the engine hears LookedUp, at once."""
        lengths: list[list[object]] = []
        if workers and len(request.units) % HASH_BYTES == 0:
            path = [request.root, *_split(request.units)]
            per_rank = [dict(self._lengths(arena, path, request.limit_tokens)) for arena in _arenas(workers)]
            common = set.intersection(*(set(found.items()) for found in per_rank))
            lengths = [[length, block_hash] for length, block_hash in sorted(common, reverse=True)][:MAX_CANDIDATES]
        engine.post(LookedUp(request.transfer_id, lengths))

    def _lengths(self, arena: Arena, path: list[BlockHash], limit_tokens: int) -> Iterator[tuple[int, BlockHash]]:
        """Lengths that one rank's arena can serve; `path[i]` is the hash of the first 16·i tokens."""
        layout = arena.layout
        shapes = [GroupShape(g.kind, g.block_tokens, g.window_tokens or 0) for g in layout.groups]
        blocks = tuple(self._bitmap(arena, index, path) for index in range(len(shapes)))
        linear = [index for index, shape in enumerate(shapes) if shape.kind == "linear_state"]
        if not linear:
            held = Held(blocks, tuple(frozenset() for _ in shapes))
            length = usable_prefix(shapes, held, limit_tokens).usable_tokens
            if length:
                yield length, path[length // HASH_UNIT_TOKENS]
            return
        for length, block_hash in self._states(arena, linear, path, limit_tokens):
            exact = tuple(
                frozenset([length]) if i in linear or self._pool.find(arena, i, block_hash) is not None else frozenset()
                for i in range(len(shapes))
            )
            if usable_prefix(shapes, Held(blocks, exact), length).usable_tokens == length:
                yield length, block_hash

    def _bitmap(self, arena: Arena, group: int, path: list[BlockHash]) -> int:
        """Bit j is set when block j of the prompt is held."""
        if arena.layout.groups[group].kind == "linear_state":
            return 0
        step = arena.layout.groups[group].block_tokens // HASH_UNIT_TOKENS
        ends = path[step::step]
        return sum(1 << j for j, block_hash in enumerate(ends) if self._pool.find(arena, group, block_hash) is not None)

    def _states(
        self, arena: Arena, linear: list[int], path: list[BlockHash], limit_tokens: int
    ) -> Iterator[tuple[int, BlockHash]]:
        """States on the prompt's path that every linear group holds, longest first."""
        for unit in reversed(path):
            found = self._pool.states_after(arena, linear[0], unit)
            for block_hash, length in sorted(found.items(), key=lambda item: -item[1]):
                everywhere = all(self._pool.find(arena, group, block_hash) is not None for group in linear)
                if everywhere and length <= limit_tokens:
                    yield length, block_hash

    def hold(self, engine: EngineConnection, workers: list[EngineConnection], request: Hold) -> None:
        """Pin the blocks of one length; the engine hears ReceiveReady or TransferFailed."""
        placement = None
        try:
            if workers and request.transfer_id not in self._reading:
                plan = make_plan(_layouts(workers), request.groups, request.num_tokens)
                placement = place_held(self._pool, plan, _arenas(workers), owner=engine.owner)
        except RemoteProtocolError as error:
            _log.warning("hold.refused", message=str(error))
        if placement is None:
            engine.post(TransferFailed(request.transfer_id, "evicted", "a block of this prefix is gone"))
            return
        self._reading[request.transfer_id] = Reading(engine, placement)
        slots, generations = (
            placement.plan.nested(list(placement.slots)),
            placement.plan.nested(placement.generations()),
        )
        engine.post(ReceiveReady(request.transfer_id, slots, generations))

    # Ending

    def end(self, transfer_id: TransferId) -> None:
        """The engine neither fills nor reads these slots any more."""
        stored = self._stored.pop(transfer_id, None)
        if stored is not None:
            del self._by_handle[stored.handle]
            stored.filling.placement.release()
        reading = self._reading.pop(transfer_id, None)
        if reading is not None:
            reading.placement.release()

    def engine_lost(self, instance: str, *, entirely: bool) -> None:
        """A process of an engine died; once it is `entirely` gone nobody touches its slots."""
        if entirely:
            engines = [(i, s.engine) for i, s in self._stored.items()] + [
                (i, r.engine) for i, r in self._reading.items()
            ]
            for transfer_id, engine in engines:
                if engine.attach.instance == instance:
                    self.end(transfer_id)


def _layouts(workers: list[EngineConnection]) -> tuple[Layout, ...]:
    return tuple(worker.layout for worker in workers if worker.layout is not None)


def _arenas(workers: list[EngineConnection]) -> tuple[Arena, ...]:
    return tuple(worker.arena for worker in workers if worker.arena is not None)


def _split(units: bytes) -> list[BlockHash]:
    return [BlockHash(units[start : start + HASH_BYTES]) for start in range(0, len(units), HASH_BYTES)]
