"""Writer of one cluster's record: holds the lease, appends entries in order, and writes snapshots.

Entry ids are <lease epoch>-<number>, and every entry names the id before it. While Redis does not answer, memory
continues and the record falls behind. Later the writer appends an entry whose `before` is RELOAD, and writes a snapshot
that covers it. Followers see the break in the chain and read everything again.

    no lease ──acquire──▶ leased ──append, renew, figures──▶ leased
       ▲                    │ Redis fails: the writer is behind, entries are dropped (the snapshot will have them)
       └────────────────────┘ FencedError: `lost` is set, the writer ends, queued and later records are refused

A writer that started without Redis has not read the record. Agents announce their blocks again, but operators' orders
exist only there. So the writer reads them before its first snapshot replaces the record.
"""

import asyncio
from collections.abc import AsyncIterator

from prfaas import logs
from prfaas.errors import FencedError, RecordUnreachable
from prfaas.index.store.redis_store import RedisStore, StreamEntry, WriterLease
from prfaas.manager.state.world import World, forgotten_record, is_block_record
from prfaas.rpc.tasks import cancel_tasks
from prfaas.types import ClusterName

RELOAD = "reload"  # Replaces the previous id: the chain is broken, read the snapshot.
_FIGURES_SECONDS = 0.5  # Pages of other managers show a change within two seconds.
_MAX_RENEWAL_SECONDS = 1.0
PLAN_EXPIRY_SECONDS = 86_400.0
_FIGURES_EXPIRY_SECONDS = 30.0
_RETRY_SECONDS = 0.25
_LOOK_SECONDS = 0.02
_MAX_ENTRIES_PER_APPEND = 64
LEASE_SECONDS = 5.0  # Without renewal, another manager may write the record.
FORGET_SECONDS = 1800.0  # Blocks of a node that is silent for so long are forgotten.
_SNAPSHOT_AFTER_BYTES = 64 << 20  # Entries since the last snapshot, or as many bytes as that snapshot had.

log = logs.get("manager.writer")


class ClusterWriter:
    """Writer of one cluster until another manager takes the lease."""

    def __init__(
        self,
        cluster: ClusterName,
        *,
        store: RedisStore,
        world: World,
        owner: str,
        lease_seconds: float,
        forget_seconds: float,
    ) -> None:
        self.cluster = cluster
        self.lost = asyncio.Event()
        self.winner = ""  # Address of the manager that has the lease, once `lost` is set.
        self._store, self._world, self._owner = store, world, owner
        self._lease_seconds, self._forget_seconds = lease_seconds, forget_seconds
        self._lease: WriterLease | None = None
        self._renewed_at = 0.0
        self._published_at = 0.0
        self._last_id = ""
        self._behind = True
        self._has_read = False
        self._queue: list[tuple[bytes, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._bytes_since_snapshot = 0
        self._snapshot_bytes = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def is_behind(self) -> bool:
        """Return whether the record lacks something that memory has."""
        return self._behind

    @property
    def has_authority(self) -> bool:
        """Return whether no other manager can write the cluster by now.

        After this process stood still, the lease may have ended. While Redis does not answer, nobody can take it.
        """
        return not self.lost.is_set() and (self._behind or _now() < self._renewed_at + self._lease_seconds)

    async def until_known(self) -> None:
        """Wait until the lease is renewed, or lost. Redis decides within the timeout of a call."""
        while not (self.has_authority or self.lost.is_set()):
            self._wake.set()
            await asyncio.sleep(_LOOK_SECONDS)

    def start(self, lease: WriterLease | None, last_id: str, *, behind: bool) -> None:
        """Begin to write after `last_id`. With `behind`, a snapshot of memory comes first.

        Without a lease (Redis does not answer, so the record was not read) memory continues alone until there is one.
        """
        self._has_read = lease is not None
        self._lease, self._last_id, self._behind = lease, last_id, behind or lease is None
        self._renewed_at = _now()
        self._task = asyncio.create_task(self._run(), name=f"writer of {self.cluster}")

    def append(self, record: bytes) -> asyncio.Future[None]:
        """Queue a record. The future is done once Redis has it, or at once while the record is behind.

        The future raises FencedError if another manager writes the cluster.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve_error)
        if self.lost.is_set():
            future.set_exception(self._fenced())
        elif self._behind:
            future.set_result(None)
        else:
            self._queue.append((record, future))
            self._wake.set()
        return future

    async def close(self) -> None:
        """Write what is queued, and release the lease."""
        if self._task is not None:
            await cancel_tasks((self._task,))
        try:
            if self._lease is not None and not self.lost.is_set():
                while self._queue and not self._behind:
                    await self._append_queued(self._lease)
                await self._store.release(self._lease)
        except (RecordUnreachable, FencedError) as error:
            log.warning("lease.release_failed", cluster=self.cluster, error=str(error))
        self._resolve_all()

    async def _run(self) -> None:
        while not self.lost.is_set():
            try:
                await self._step()
            except RecordUnreachable as error:
                self._fall_behind(str(error))
                await asyncio.sleep(_RETRY_SECONDS)
            except FencedError as error:
                self._end_as_fenced(error)
            # After an error of our own, callers must not wait for their records forever.
            except Exception as error:
                log.exception("writer.failed", cluster=self.cluster)
                self._fall_behind(repr(error))
                await asyncio.sleep(_RETRY_SECONDS)

    async def _step(self) -> None:
        lease = await self._renewed_lease()
        await self._publish_figures(lease)
        if self._behind:
            await self._catch_up(lease)
        elif self._queue:
            await self._append_queued(lease)
            if self._bytes_since_snapshot > max(_SNAPSHOT_AFTER_BYTES, self._snapshot_bytes):
                await self._write_snapshot(lease, chunks=self._chunks(is_record_complete=True))
        else:
            await self._wait()

    async def _wait(self) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(self._period(_FIGURES_SECONDS)):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _period(self, seconds: float) -> float:
        """Return the period of a repeated task, at least three times within a lease."""
        return min(seconds, self._lease_seconds / 3)

    async def _renewed_lease(self) -> WriterLease:
        """Return the lease, renewed after a third of its time. The plan is written with it."""
        if self._lease is not None and _now() < self._renewed_at + self._period(_MAX_RENEWAL_SECONDS):
            return self._lease
        # Epochs only grow, even if Redis has lost its data.
        before = self._lease.epoch if self._lease else None
        lease = await self._store.acquire(self.cluster, owner=self._owner, seconds=self._lease_seconds)
        if before is not None and lease.epoch_before > before:
            await self._store.release(lease)
            raise FencedError(f"another manager wrote {self.cluster} after this manager's lease had ended")
        self._lease, self._renewed_at = lease, _now()
        if self._world.plan is not None:
            plan, key = self._world.plan.to_json(), self._store.keys.plan(self.cluster)
            await self._store.put(lease, key, plan, seconds=PLAN_EXPIRY_SECONDS)
        self._forget_silent()
        return lease

    async def _publish_figures(self, lease: WriterLease) -> None:
        """Publish the nodes' figures if they are due."""
        if _now() < self._published_at + self._period(_FIGURES_SECONDS):
            return
        self._published_at = _now()
        figures, key = self._world.figures(self.cluster), self._store.keys.figures(self.cluster)
        await self._store.put(lease, key, figures, seconds=_FIGURES_EXPIRY_SECONDS)

    def _forget_silent(self) -> None:
        for name in self._world.silent_for(self._forget_seconds, self.cluster):
            self._world.forget(name)
            self.append(forgotten_record(name))

    async def _append_queued(self, lease: WriterLease) -> None:
        taken = self._queue[:_MAX_ENTRIES_PER_APPEND]
        entries, before = [], self._last_id
        for record, _ in taken:
            entries.append(StreamEntry(_next_id(before, lease.epoch), before, record))
            before = entries[-1].id
        await self._store.append(lease, entries)
        del self._queue[: len(taken)]
        self._last_id = before
        self._bytes_since_snapshot += sum(len(record) for record, _ in taken)
        for _, future in taken:
            _resolve(future)

    def _fall_behind(self, why: str) -> None:
        if not self._behind:
            log.warning("record.unreachable", cluster=self.cluster, error=why)
        self._behind = True
        self._resolve_all()

    def _resolve_all(self) -> None:
        for _, future in self._queue:
            _resolve(future)
        self._queue.clear()

    async def _catch_up(self, lease: WriterLease) -> None:
        """Break the chain, and write a snapshot of memory."""
        if not self._has_read:
            await self._read_orders()
        last = await self._store.last_id(self.cluster)
        marker = StreamEntry(_next_id(last, lease.epoch), RELOAD, b"")
        await self._store.append(lease, [marker])
        self._last_id, self._behind = marker.id, False
        await self._write_snapshot(lease, chunks=self._chunks(is_record_complete=False))
        log.info("record.caught_up", cluster=self.cluster)

    async def _read_orders(self) -> None:
        position, chunks = await self._store.read_snapshot(self.cluster)
        found = [chunk for chunk in chunks if not is_block_record(chunk)]
        while entries := await self._store.tail(self.cluster, position):
            found += [entry.data for entry in entries if not is_block_record(entry.data)]
            position = entries[-1].id
        self._world.take_orders(found)
        self._has_read = True

    async def _write_snapshot(self, lease: WriterLease, *, chunks: AsyncIterator[bytes]) -> None:
        covers, self._bytes_since_snapshot, self._snapshot_bytes = self._last_id, 0, 0
        await self._store.write_snapshot(lease, covers=covers, chunks=chunks, renewed=lambda: self._lease)

    async def _chunks(self, *, is_record_complete: bool) -> AsyncIterator[bytes]:
        """Yield memory's records.

        In between, publish figures and, if the record is whole without this snapshot, append batches.
        """
        for record in self._world.records(self.cluster):
            self._snapshot_bytes += len(record)
            yield record
            lease = await self._renewed_lease()
            await self._publish_figures(lease)
            if self._queue and is_record_complete:
                await self._append_queued(lease)

    def _end_as_fenced(self, error: FencedError) -> None:
        self.winner = error.writer
        log.warning("writer.fenced", cluster=self.cluster, winner=error.writer, error=str(error))
        self.lost.set()
        for _, future in self._queue:
            if not future.done():
                future.set_exception(self._fenced())
        self._queue.clear()

    def _fenced(self) -> FencedError:
        return FencedError(f"another manager writes {self.cluster}", writer=self.winner)


def _next_id(before: str, epoch: int) -> str:
    """Return the id after `before`, at least the first one of this epoch."""
    first, _, second = before.partition("-")
    return f"{epoch}-1" if int(first or 0) < epoch else f"{first}-{int(second or 0) + 1}"


def _retrieve_error(future: asyncio.Future[None]) -> None:
    """Mark the error as retrieved: a manager that lost the lease reads the record again, so nobody needs it."""
    if not future.cancelled():
        future.exception()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _now() -> float:
    return asyncio.get_running_loop().time()
