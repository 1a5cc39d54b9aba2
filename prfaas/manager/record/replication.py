"""Replication of every cluster: written by this manager if it has the lease, else followed from the record."""

import asyncio
import contextlib
from collections.abc import Iterable

from prfaas import logs, metrics
from prfaas.errors import IndexRefusal, RecordUnreachable
from prfaas.index.store.redis_store import START_ID, RedisStore, StreamEntry, WriterLease
from prfaas.manager.record.cluster_writer import ClusterWriter
from prfaas.manager.state.world import World, is_block_record
from prfaas.rpc.tasks import TimeSlice, cancel_tasks, restarting_task
from prfaas.types import ClusterName

_DISCOVER_SECONDS = 1.0
_RETRY_SECONDS = 0.25
_FIGURES_SECONDS = 0.25  # Period of reading other managers' figures, which are written twice a second.
_LEAST_WAIT_SECONDS = 0.01

log = logs.get("manager.replication")


class Replication:
    """Keeps the record and the world in agreement."""

    def __init__(
        self, store: RedisStore, world: World, *, lease_seconds: float, forget_seconds: float, takes_plans: bool
    ) -> None:
        """With `takes_plans`, a recorded plan is in force here: it may outlive the setting that it was made for."""
        self._store, self._world, self._owner = store, world, ""
        self._takes_plans = takes_plans
        self._lease_seconds, self._forget_seconds = lease_seconds, forget_seconds
        self._clusters: list[ClusterName] = []  # Clusters in the record.
        self._positions: dict[ClusterName, str] = {}  # Last applied entry of each followed cluster.
        self._retired: set[ClusterName] = set()  # Not followed until a manager writes them again.
        self._writers: dict[ClusterName, ClusterWriter] = {}
        self._locks: dict[ClusterName, asyncio.Lock] = {}
        self._follower: asyncio.Task[None] | None = None
        self._watchers: set[asyncio.Task[None]] = set()
        self._figures: dict[ClusterName, bytes] = {}  # As last read.
        self._figures_due = 0.0
        self.is_stale = True  # The record does not answer, or has not been read yet.
        self.has_loaded = asyncio.Event()

    def start(self, *, owner: str) -> None:
        """Begin to follow. `owner` starts with the address that agents are redirected to (`writer_address`)."""
        self._owner = owner
        self._follower = restarting_task(self._follow, name="follower", ended=metrics.MANAGER_TASKS_ENDED)

    async def close(self) -> None:
        """Write what is queued, and release all leases."""
        await cancel_tasks(task for task in (self._follower, *self._watchers) if task is not None)
        await asyncio.gather(*(writer.close() for writer in self._writers.values()))
        self._writers.clear()

    async def owners(self) -> dict[ClusterName, str]:
        """Return the owner strings of the managers that write each cluster; none while the record does not answer."""
        with contextlib.suppress(RecordUnreachable):
            found = {cluster: await self._store.owner(cluster) for cluster in await self._store.clusters()}
            return {cluster: owner for cluster, owner in found.items() if owner}
        return {}

    @property
    def num_written(self) -> int:
        return len(self._writers)

    def writes(self, cluster: ClusterName) -> bool:
        """Return whether this manager writes a cluster's record, so that the cluster's agents report here."""
        writer = self._writers.get(cluster)
        return writer is not None and writer.has_authority

    @property
    def is_recording(self) -> bool:
        """Return whether the record has everything that agents reported to this manager."""
        return not any(writer.is_behind for writer in self._writers.values())

    async def writer_for(self, cluster: ClusterName) -> ClusterWriter:
        """Return this manager's writer of a cluster. The manager becomes the writer if there is none.

        Raises:
            FencedError: another manager writes it; the error names its address.
        """
        async with self._lock(cluster):
            writer = self._writers.get(cluster)
            if writer is not None:
                await writer.until_known()
                if writer.has_authority:
                    return writer
            return await self._become_writer(cluster)

    def _lock(self, cluster: ClusterName) -> asyncio.Lock:
        """Return the lock for reading a whole cluster, and for becoming its writer."""
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
            lease: WriterLease | None = await self._store.acquire(
                cluster, owner=self._owner, seconds=self._lease_seconds
            )
            position, unbroken = await self._read_to_the_end(cluster)
        except RecordUnreachable as error:
            log.warning("writer.started_without_record", cluster=cluster, error=str(error))
            lease, position, unbroken = None, START_ID, False
        self._positions.pop(cluster, None)
        self._writers[cluster] = writer
        self._world.set_changing_role(cluster, frozenset())  # A role change of the previous writer does not continue.
        writer.start(lease, position, behind=not unbroken)
        self._watch(writer)
        log.info("writer.started", cluster=cluster, epoch=lease.epoch if lease else None)
        return writer

    def _watch(self, writer: ClusterWriter) -> None:
        task = asyncio.create_task(self._after_loss(writer), name=f"loss of {writer.cluster}")
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _after_loss(self, writer: ClusterWriter) -> None:
        """Follow a cluster that another manager took over. Changes beyond the record are void."""
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
                # Nodes of other writers are known through the record only.
                self._world.keep_alive(but=self._writers)
            self._world.refresh()

    async def _discover(self) -> None:
        """Load new clusters, retire clusters without a writer, and adopt the newest plan."""
        self._clusters = await self._store.clusters()
        for cluster in self._followed:
            if cluster in self._positions:
                await self._retire_if_over(cluster)
            elif cluster not in self._retired or await self._store.writer(cluster) is not None:
                await self._load(cluster)
        self._figures, self._figures_due = {}, 0.0
        await self._read_figures()
        if self._takes_plans:
            for data in (await self._store.get(self._clusters, self._store.keys.plan)).values():
                self._world.apply_plan(data)
        self._world.refresh()

    @property
    def _followed(self) -> list[ClusterName]:
        return [cluster for cluster in self._clusters if cluster not in self._writers]

    async def _retire_if_over(self, cluster: ClusterName) -> None:
        """Forget a cluster's nodes if all have been silent for long and there is no writer to forget them."""
        if not self._world.is_silent(cluster, self._forget_seconds):
            return
        async with self._lock(cluster):
            if cluster in self._positions and await self._store.writer(cluster) is None:
                del self._positions[cluster]
                self._retired.add(cluster)
                self._world.replace_nodes(cluster, ())
                log.info("cluster.retired", cluster=cluster)

    async def _read_figures(self) -> None:
        """Read the figures of the clusters that other managers write, if they are due."""
        if _now() < self._figures_due:
            return
        found = await self._store.get(self._followed, self._store.keys.figures)
        for cluster, data in found.items():
            # Ownership may have changed meanwhile.
            if cluster not in self._writers and data != self._figures.get(cluster):
                self._world.apply_figures(cluster, data)
        for cluster in self._followed:
            if cluster not in found:
                self._world.set_changing_role(cluster, frozenset())  # Its writer has ended.
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

    async def _apply_followed(self, cluster: ClusterName, position: str, entries: Iterable[StreamEntry]) -> bool:
        """Apply entries of a cluster that is followed up to `position`, and return whether the chain held.

        Other tasks run in between and may take the cluster over or reload it. Then the rest is skipped.
        """
        time_slice = TimeSlice()
        for entry in entries:
            if self._positions.get(cluster) != position:
                return True
            if entry.before != position:
                return False
            self._apply_data(entry.data)
            self._positions[cluster] = position = entry.id
            await time_slice.yield_if_over()
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
        """Read the snapshot and the stream after it, and return the last applied entry.

        While a snapshot is being written, memory stays unchanged.
        """
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
        """Append the stream after `position` up to a break, and return the last entry and whether the chain held."""
        while entries := await self._store.tail(cluster, position):
            for entry in entries:
                if entry.before != position:
                    return position, False
                records.append(entry.data)
                position = entry.id
        return position, True

    async def _replace(self, cluster: ClusterName, records: Iterable[bytes]) -> None:
        """Replace everything known of a cluster by its record. Its nodes stay known throughout."""
        time_slice = TimeSlice()
        nodes: list[bytes] = []
        blocks: list[bytes] = []
        for data in records:
            (blocks if is_block_record(data) else nodes).append(data)
            await time_slice.yield_if_over()
        self._world.replace_nodes(cluster, nodes)
        for data in blocks:
            self._apply_data(data)
            await time_slice.yield_if_over()

    async def _read_to_the_end(self, cluster: ClusterName) -> tuple[str, bool]:
        """Apply everything that former writers recorded. They can add nothing, since this manager has the lease.

        Return the last entry, and whether the chain held. A break is accepted: the nodes' digests show what is missing,
        and a snapshot ends the break for followers.
        """
        # Removed first, so that the follower applies nothing twice.
        position = self._positions.pop(cluster, None)
        unbroken = True
        if position is None:
            position, records = await self._store.read_snapshot(cluster)
            await self._replace(cluster, records)  # Changes under a lost lease are void.
        time_slice = TimeSlice()
        while entries := await self._store.tail(cluster, position):
            for entry in entries:
                await time_slice.yield_if_over()
                unbroken = unbroken and entry.before == position
                if entry.data:
                    self._apply_data(entry.data)
                position = entry.id
        return position, unbroken


def _now() -> float:
    return asyncio.get_running_loop().time()
