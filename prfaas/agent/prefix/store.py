"""Prefix blocks of the engines on this machine: blocks that they store, look up and read."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from prfaas import logs
from prfaas.agent.engine.protocol import (
    BlocksFound,
    FindBlocks,
    Forget,
    Forgotten,
    Hold,
    LookedUp,
    Lookup,
    Store,
    TransferFailed,
)
from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.agent.engine.server import EngineConnection, arenas_of, layouts_of
from prfaas.agent.prefix.lookup import servable_lengths
from prfaas.agent.prefix.promotion import LocalHoldings, promote
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
class _PrefixUse:
    """Blocks that an engine writes for later requests, reads, or waits for while they are read from the SSD."""

    engine: EngineConnection
    end: Callable[[], None]
    # Of blocks that the engine writes.
    progress: LayerProgress | None = None
    # Monotonic seconds until which the engine waits.
    deadline: float = math.inf


class PrefixStore:
    """Stores, lookups and reads of this node's engines. Runs on the agent's loop."""

    def __init__(self, pool: Pool, handles: Iterator[int], *, ssd: SsdTier | None) -> None:
        """`handles` number the transfers and stores that ring entries name."""
        self._pool = pool
        self._ssd = ssd
        self._handles = handles
        self._uses: dict[TransferId, _PrefixUse] = {}
        self._by_handle: dict[int, TransferId] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def on_message(
        self, engine: EngineConnection, workers: list[EngineConnection], message: Store | Lookup | FindBlocks | Hold
    ) -> None:
        """Answer an engine with these ranks."""
        if isinstance(message, Store):
            self._store(engine, workers, message)
        elif isinstance(message, Lookup):
            engine.post(self._look_up(workers, message))
        elif isinstance(message, FindBlocks):
            engine.post(self._find(workers, message))
        else:
            self._hold(engine, workers, message)

    def _store(self, engine: EngineConnection, workers: list[EngineConnection], request: Store) -> None:
        """Allocate slots for computed blocks; post SendOpened or TransferFailed."""
        placement = None
        if workers and request.transfer_id not in self._uses:
            try:
                plan = make_plan(layouts_of(workers), request.groups, request.num_tokens)
                placement = place(self._pool, plan, arenas_of(workers))
            except RemoteProtocolError as error:
                _log.warning("store.refused", message=str(error))
        if placement is None:
            engine.post(TransferFailed(request.transfer_id, "no_memory", "no room for these blocks"))
            return
        handle = next(self._handles) & 0xFFFFFFFF

        def end() -> None:
            del self._by_handle[handle]
            placement.release()

        self._uses[request.transfer_id] = _PrefixUse(engine, end, LayerProgress(placement))
        self._by_handle[handle] = request.transfer_id
        engine.post(placement.send_opened(request.transfer_id, handle))

    def on_ring(self, worker: EngineConnection, entry: RingEntry) -> None:
        """Take a worker's ring entry. Entries of other engines' blocks are ignored."""
        if entry.kind is EntryKind.SCHEDULER_REATTACHED:
            for transfer_id in list(self._by_handle.values()):
                if self._uses[transfer_id].engine.session < entry.handle:
                    self._rank_done(transfer_id, worker)
            return
        found = self._by_handle.get(entry.handle)
        if found is None or self._uses[found].engine.instance != worker.instance:
            return
        progress = self._uses[found].progress
        if entry.kind is EntryKind.LAYER_READY and progress is not None:
            progress.layer_ready(worker.attach.rank, entry)
        elif entry.kind is EntryKind.REQUEST_ENDED:
            self._rank_done(found, worker)

    def _rank_done(self, transfer_id: TransferId, worker: EngineConnection) -> None:
        """Record that a rank writes nothing more, if the blocks are its engine's."""
        use = self._uses[transfer_id]
        is_own = use.engine.instance == worker.instance
        if is_own and use.progress is not None and use.progress.rank_done(worker.attach.rank):
            self.end(transfer_id, worker.instance)

    def _look_up(self, workers: list[EngineConnection], request: Lookup) -> LookedUp:
        """Return the lengths of a prompt that this node can serve."""
        lengths: list[list[object]] = []
        if workers and len(request.units) % HASH_BYTES == 0:
            path = [request.root, *_hashes(request.units)]
            ranks = [LocalHoldings(self._pool, self._ssd, arena) for arena in arenas_of(workers)]
            found = servable_lengths(ranks, path, request.limit_tokens)
            lengths = [[length, block_hash] for length, block_hash in found]
        return LookedUp(request.transfer_id, lengths)

    def _find(self, workers: list[EngineConnection], request: FindBlocks) -> BlocksFound:
        """Return which blocks every rank holds."""
        ranks = [
            LocalHoldings(self._pool, self._ssd, arena).have(0, _hashes(request.hashes)) for arena in arenas_of(workers)
        ]
        return BlocksFound(request.transfer_id, bytes(map(all, zip(*ranks, strict=True))))

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
        if not workers or transfer_id in self._uses:
            return False
        plan, arenas = make_plan(layouts_of(workers), request.groups, request.num_tokens), arenas_of(workers)
        placement = place(self._pool, plan, arenas, may_allocate=False)
        if placement is not None:
            self._hand_out(engine, transfer_id, placement)
            return True
        done = partial(self._hand_out, engine, transfer_id)
        promotion = promote(self._pool, self._ssd, plan, arenas, done=done)
        if promotion is None:
            return False
        deadline = time.monotonic() + SSD_WAIT_SECONDS
        self._uses[transfer_id] = _PrefixUse(engine, promotion.cancel, deadline=deadline)
        promotion.begin()
        return True

    def _hand_out(self, engine: EngineConnection, transfer_id: TransferId, placement: Placement | None) -> None:
        self._uses.pop(transfer_id, None)
        if placement is None:
            engine.post(TransferFailed(transfer_id, "evicted", "a block of this prefix is gone"))
        else:
            self._uses[transfer_id] = _PrefixUse(engine, placement.release)
            engine.post(placement.receive_ready(transfer_id))

    def expire(self, now: float) -> None:
        """Answer engines that have waited too long for the SSD; `now` is monotonic seconds."""
        for transfer_id, use in [item for item in self._uses.items() if now > item[1].deadline]:
            self.end(transfer_id, use.engine.instance)
            use.engine.post(TransferFailed(transfer_id, "evicted", "the SSD did not deliver the blocks in time"))

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
        """End the instance's use of these blocks."""
        use = self._uses.get(transfer_id)
        if use is not None and use.engine.instance == instance:
            del self._uses[transfer_id]
            use.end()

    def engine_lost(self, engine: EngineConnection, *, is_last: bool) -> None:
        """End the reads of a lost connection; a worker that still reads notices the slots' new generations.

        Blocks that workers may write to stay until they report otherwise, or until the last connection is gone.
        """
        for transfer_id, use in list(self._uses.items()):
            if is_last or (use.engine is engine and use.progress is None):
                self.end(transfer_id, engine.instance)


def _hashes(joined: bytes) -> list[BlockHash]:
    return [BlockHash(joined[start : start + HASH_BYTES]) for start in range(0, len(joined), HASH_BYTES)]
