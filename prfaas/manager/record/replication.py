"""Every cluster in this process: written by this manager where it has the lease, followed from the record elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prfaas import logs, metrics
from prfaas.errors import IndexRefusal, RecordUnreachable
from prfaas.index.store.redis_store import START_ID, Entry, Lease, RedisStore
from prfaas.manager.record.cluster_writer import ClusterWriter
from prfaas.manager.state.world import World, is_block_record
from prfaas.rpc.tasks import TimeSlice, cancel_tasks, restarting_task
from prfaas.types import ClusterName

_DISCOVER_SECONDS = 1.0
_RETRY_SECONDS = 0.25
_FIGURES_SECONDS = 0.25  # how often those of others are read; they are written twice a second
_LEAST_WAIT_SECONDS = 0.01

log = logs.get("manager.replication")


class Replication:
    """Brings the record and the world together."""

    def __init__(
        self, store: RedisStore, world: World, *, lease_seconds: float, forget_seconds: float, takes_plans: bool
    ) -> None:
        """`takes_plans`: a plan in the record is in force here; it outlives the setting that it was made for."""
        self._store, self._world, self._owner = store, world, ""
        self._takes_plans = takes_plans
        self._lease_seconds, self._forget_seconds = lease_seconds, forget_seconds
        self._clusters: list[ClusterName] = []  # of the record
        self._positions: dict[ClusterName, str] = {}  # last entry applied, of every cluster that is followed
        self._retired: set[ClusterName] = set()  # not followed until somebody writes them again
        self._writers: dict[ClusterName, ClusterWriter] = {}
        self._locks: dict[ClusterName, asyncio.Lock] = {}
        self._follower: asyncio.Task[None] | None = None
        self._watchers: set[asyncio.Task[None]] = set()
        self._figures: dict[ClusterName, bytes] = {}  # as they were read last
        self._figures_due = 0.0
        self.is_stale = True  # the record does not answer, or has not been read yet
        self.has_loaded = asyncio.Event()

    def start(self, *, owner: str) -> None:
        """Begin to follow; `owner` is "<address> <random>", the address being where agents are sent to."""
        self._owner = owner
        self._follower = restarting_task(self._follow, name="follower", ended=metrics.MANAGER_TASKS_ENDED)

    async def close(self) -> None:
        """Write what is queued and give every lease back."""
        await cancel_tasks(task for task in (self._follower, *self._watchers) if task is not None)
        await asyncio.gather(*(writer.close() for writer in self._writers.values()))
        self._writers.clear()

    @property
    def num_written(self) -> int:
        return len(self._writers)

    def writes(self, cluster: ClusterName) -> bool:
        """Whether this manager writes a cluster's record now, so that its agents are here."""
        writer = self._writers.get(cluster)
        return writer is not None and not writer.lost.is_set()

    @property
    def is_recording(self) -> bool:
        """Whether everything that agents told this manager goes to the record."""
        return not any(writer.is_behind for writer in self._writers.values())

    async def writer_for(self, cluster: ClusterName) -> ClusterWriter:
        """This manager's writer of a cluster, which it becomes when nobody is.

        Raises:
            Fenced: another manager writes it; the error names its address.
        """
        async with self._lock(cluster):
            writer = self._writers.get(cluster)
            if writer is not None and not writer.lost.is_set():
                return writer
            return await self._become_writer(cluster)

    def _lock(self, cluster: ClusterName) -> asyncio.Lock:
        """Whoever reads a whole cluster, or becomes its writer, holds this."""
        return self._locks.setdefault(cluster, asyncio.Lock())

    async def _become_writer(self, cluster: ClusterName) -> ClusterWriter:
        writer = ClusterWriter(
            cluster,
            store=self._store,
            world=self._world,
            owner=self._owner,
            lease_seconds=self._lease_seconds,
            forget_seconds=self._forget_seconds,
        )
        try:
            lease: Lease | None = await self._store.acquire(cluster, owner=self._owner, seconds=self._lease_seconds)
            position, unbroken = await self._read_to_the_end(cluster)
        except RecordUnreachable as error:
            log.warning("writer.without_record", cluster=cluster, error=str(error))
            lease, position, unbroken = None, START_ID, False
        self._positions.pop(cluster, None)
        self._writers[cluster] = writer
        self._world.turn(cluster, frozenset())  # what another manager was about to do is not going on
        writer.start(lease, position, behind=not unbroken)
        self._watch(writer)
        log.info("writer.started", cluster=cluster, epoch=lease.epoch if lease else None)
        return writer

    def _watch(self, writer: ClusterWriter) -> None:
        task = asyncio.create_task(self._after_loss(writer), name=f"loss of {writer.cluster}")
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _after_loss(self, writer: ClusterWriter) -> None:
        """Follow a cluster that another manager has taken over: what memory has beyond the record is void."""
        await writer.lost.wait()
        if self._writers.get(writer.cluster) is writer:
            del self._writers[writer.cluster]
            await self._reload_until_read(writer.cluster)

    async def _reload_until_read(self, cluster: ClusterName) -> None:
        while True:
            try:
                await self._load(cluster)
                return
            except RecordUnreachable:
                await asyncio.sleep(_RETRY_SECONDS)

    # -- following

    async def _follow(self) -> None:
        while True:
            try:
                await self._discover()
                self.is_stale = False
                self.has_loaded.set()
                deadline = _now() + _DISCOVER_SECONDS
                while _now() < deadline:
                    await self._read_new()
                    await self._read_figures()
            except RecordUnreachable as error:
                if not self.is_stale:
                    log.warning("record.unreachable", error=str(error))
                self.is_stale = True
                await asyncio.sleep(_RETRY_SECONDS)
                self._world.keep_alive(but=self._writers)  # it hears of the others' from the record alone
            self._world.refresh()

    async def _discover(self) -> None:
        """Load clusters that are new, leave those that nobody writes any more; take the newest plan."""
        self._clusters = await self._store.clusters()
        for cluster in self._followed:
            if cluster in self._positions:
                await self._retire_if_over(cluster)
            elif cluster not in self._retired or await self._store.writer(cluster) is not None:
                await self._load(cluster)
        self._figures, self._figures_due = {}, 0.0
        await self._read_figures()
        if self._takes_plans:
            for data in (await self._store.plans(self._clusters)).values():
                self._world.apply_plan(data)
        self._world.refresh()

    @property
    def _followed(self) -> list[ClusterName]:
        return [cluster for cluster in self._clusters if cluster not in self._writers]

    async def _retire_if_over(self, cluster: ClusterName) -> None:
        """Forget the nodes of a cluster when all have been silent for long and no writer is there to forget them."""
        if not self._world.is_silent(cluster, self._forget_seconds):
            return
        async with self._lock(cluster):
            if cluster in self._positions and await self._store.writer(cluster) is None:
                del self._positions[cluster]
                self._retired.add(cluster)
                self._world.replace_nodes(cluster, ())
                log.info("cluster.retired", cluster=cluster)

    async def _read_figures(self) -> None:
        """Take the figures of the clusters that others write, when it is time."""
        if _now() < self._figures_due:
            return
        found = await self._store.figures(self._followed)
        for cluster, data in found.items():
            if cluster not in self._writers and data != self._figures.get(cluster):  # it may have become ours meanwhile
                self._world.apply_figures(cluster, data)
        for cluster in self._followed:
            if cluster not in found:
                self._world.turn(cluster, frozenset())  # whose writer has ended
        self._figures, self._figures_due = found, _now() + _FIGURES_SECONDS

    async def _read_new(self) -> None:
        if not self._positions:
            await asyncio.sleep(_FIGURES_SECONDS)
            return
        positions = dict(self._positions)
        wait_seconds = max(_LEAST_WAIT_SECONDS, self._figures_due - _now())
        for cluster, entries in (await self._store.read(positions, wait_seconds=wait_seconds)).items():
            if not await self._apply_followed(cluster, positions[cluster], entries):
                await self._load(cluster)

    async def _apply_followed(self, cluster: ClusterName, position: str, entries: Iterable[Entry]) -> bool:
        """Apply entries of a cluster that was followed up to `position`, as long as it is: while others have their turn it
        may be taken over or read anew. Whether the chain held."""
        time_slice = TimeSlice()
        for entry in entries:
            if self._positions.get(cluster) != position:
                return True
            if entry.before != position:
                return False
            self._apply_data(entry.data)
            self._positions[cluster] = position = entry.id
            await time_slice.give_when_over()
        return True

    def _apply_data(self, data: bytes) -> None:
        try:
            self._world.apply_record(data)
        except IndexRefusal as error:
            metrics.MANAGER_REFUSALS.labels(call="record", reason=error.reason).inc()

    async def _load(self, cluster: ClusterName) -> None:
        async with self._lock(cluster):
            if cluster not in self._writers:
                self._positions.pop(cluster, None)
                self._positions[cluster] = await self._reload(cluster)
                self._retired.discard(cluster)

    async def _reload(self, cluster: ClusterName) -> str:
        """Snapshot, then the stream after it; returns the last entry applied. While a snapshot is being written, memory
        stays as it is."""
        metrics.MANAGER_RELOADS.inc()
        while True:
            position, records = await self._store.read_snapshot(cluster)
            position, unbroken = await self._read_on(cluster, position, records)
            if unbroken or await self._store.writer(cluster) is None:
                await self._replace(cluster, records)
                return position
            await asyncio.sleep(_RETRY_SECONDS)
            await self._read_figures()

    async def _read_on(self, cluster: ClusterName, position: str, records: list[bytes]) -> tuple[str, bool]:
        """Add what the stream has after `position`, up to a break; returns the last entry, and whether the chain held."""
        while entries := await self._store.tail(cluster, position):
            for entry in entries:
                if entry.before != position:
                    return position, False
                records.append(entry.data)
                position = entry.id
        return position, True

    async def _replace(self, cluster: ClusterName, records: Iterable[bytes]) -> None:
        """All that is known of a cluster is what its record says; at no time are its nodes away."""
        time_slice = TimeSlice()
        nodes: list[bytes] = []
        blocks: list[bytes] = []
        for data in records:
            (blocks if is_block_record(data) else nodes).append(data)
            await time_slice.give_when_over()
        self._world.replace_nodes(cluster, nodes)
        for data in blocks:
            self._apply_data(data)
            await time_slice.give_when_over()

    async def _read_to_the_end(self, cluster: ClusterName) -> tuple[str, bool]:
        """Take everything that former writers recorded; they can add nothing, since the lease is ours.

        Returns the last entry, and whether the chain held. A break is taken as it is: the nodes' digests find what is
        missing, and a snapshot must end the break for those who follow.
        """
        position = self._positions.pop(cluster, None)  # so that nothing that was read before is applied once more
        unbroken = True
        if position is None:
            position, records = await self._store.read_snapshot(cluster)
            await self._replace(cluster, records)  # what memory may have from a lease that was lost is void
        time_slice = TimeSlice()
        while entries := await self._store.tail(cluster, position):
            for entry in entries:
                await time_slice.give_when_over()
                unbroken = unbroken and entry.before == position
                if entry.data:
                    self._apply_data(entry.data)
                position = entry.id
        return position, unbroken


def _now() -> float:
    return asyncio.get_running_loop().time()
