"""Writer of a cluster and its followers, with a real Redis that fences it, stops, or lacks a snapshot."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from prfaas.errors import FencedError
from prfaas.index.membership import Engine, Node
from prfaas.index.store.redis_store import START_ID, RedisStore, StreamEntry
from prfaas.manager.record.cluster_writer import RELOAD, ClusterWriter
from prfaas.manager.record.embedded_redis import EmbeddedRedis
from prfaas.manager.record.replication import Replication
from prfaas.manager.state.world import World, leaving_record, node_record, role_record
from prfaas.types import AgentName, ClusterName, InstanceId, InstanceRole
from tests.support.deployment import hybrid_layout
from tests.support.waiting import PATIENCE_SECONDS, POLL_SECONDS, until

EAST = ClusterName("east")
FORGET_SECONDS = 1800.0


def node(name: str, *, epoch: int = 1) -> Node:
    engine = Engine(InstanceId(f"{name}-engine"), f"http://{name}:8000", "both", "tiny")
    return Node(AgentName(name), EAST, "pd", f"{name}:7400", epoch, (hybrid_layout(),), (engine,))


class Recorder:
    """Replication of one manager, between its memory and Redis."""

    def __init__(
        self,
        redis: EmbeddedRedis,
        name: str,
        *,
        clock: Callable[[], float] | None = None,
        lease_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.store = RedisStore(redis.url)
        clock = clock or asyncio.get_running_loop().time
        self.world = World(expiry_seconds=PATIENCE_SECONDS, clock=clock)
        self.replication = Replication(
            self.store, self.world, lease_seconds=lease_seconds, forget_seconds=FORGET_SECONDS, takes_plans=True
        )
        self.replication.start(owner=f"{name}:7410 x")

    def roles(self) -> dict[str, InstanceRole]:
        return {engine.instance: engine.role for member in self.world.live() for engine in member.node.engines}

    def live(self) -> list[str]:
        return [member.node.name for member in self.world.live()]

    def known(self) -> list[str]:
        return sorted(member.node.name for member in self.world.membership)

    async def write(self, *nodes: Node) -> None:
        """Register nodes, in the record too."""
        for registered in nodes:
            writer = await self.replication.writer_for(registered.cluster)
            self.world.register(registered)
            await writer.append(node_record(registered))

    async def close(self) -> None:
        await self.replication.close()
        await self.store.close()


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[EmbeddedRedis]:
    started = EmbeddedRedis(tmp_path / "redis")
    await started.start()
    yield started
    await started.close()


async def test_callers_of_a_fenced_writer_are_sent_to_the_winner(redis: EmbeddedRedis) -> None:
    writing, thief = Recorder(redis, "first"), RedisStore(redis.url)
    writer = await writing.replication.writer_for(EAST)
    await writer.append(node_record(node("n1")))
    await thief._client.delete(thief.keys.lease(EAST))
    await thief.acquire(EAST, owner="second:7410 y", seconds=PATIENCE_SECONDS)
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(FencedError):
            await writer.append(role_record(AgentName("n1"), "prefill"))
        with pytest.raises(FencedError):
            await writer.append(role_record(AgentName("n1"), "prefill"))
    assert [entry.data for entry in await thief.tail(EAST, "0-0")].count(node_record(node("n1"))) == 1
    await thief.close()
    await writing.close()


async def test_a_manager_that_stood_still_has_no_authority_until_its_lease_is_renewed(redis: EmbeddedRedis) -> None:
    stalled = Recorder(redis, "first", lease_seconds=1.0)
    await stalled.write(node("n1"))
    assert stalled.replication.writes(EAST)

    async def take_over() -> None:
        thief = RedisStore(redis.url)
        while await thief.writer(EAST) is not None:  # noqa: ASYNC110 - Redis ends the lease
            await asyncio.sleep(POLL_SECONDS)
        await thief.acquire(EAST, owner="second:7410 y", seconds=PATIENCE_SECONDS)
        await thief.close()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(asyncio.run, take_over()).result()  # Blocks this event loop.
    assert not stalled.replication.writes(EAST), "without a word from Redis"
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(FencedError, match="second:7410"):
            await stalled.replication.writer_for(EAST)
    await stalled.close()


async def test_orders_survive_a_record_that_was_unreadable_at_the_start(redis: EmbeddedRedis) -> None:
    first = Recorder(redis, "first")
    writer = await first.replication.writer_for(EAST)
    for registered in (node("n1"), node("n2"), node("n3")):
        first.world.register(registered)
        writer.append(node_record(registered))
    for name in ("n1", "n2"):
        first.world.order_role(AgentName(name), "prefill")
        writer.append(role_record(AgentName(name), "prefill"))
    first.world.drain(AgentName("n3"))
    await writer.append(leaving_record(node("n3")))
    await first.close()
    await redis.close()

    second = Recorder(redis, "second")
    writer = await second.replication.writer_for(EAST)
    for registered in (node("n1"), node("n2")):
        second.world.register(registered)
    second.world.order_role(AgentName("n2"), "decode")  # Ordered later.
    assert second.roles() == {"n1-engine": "both", "n2-engine": "decode"}
    await redis.start()
    await until(lambda: not writer.is_behind, what="Redis is back")
    second.world.register(node("n3"))
    await writer.append(node_record(node("n3")))  # Written after the snapshot of memory.
    expected = {"n1-engine": "prefill", "n2-engine": "decode", "n3-engine": "both"}
    assert second.roles() == expected and second.world.leaving == {"n3"}
    await second.close()

    third = Recorder(redis, "third")
    await third.replication.writer_for(EAST)
    for name in ("n1", "n2", "n3"):
        third.world.record_report(AgentName(name), epoch=1, links=None)
    assert third.roles() == expected and third.world.leaving == {"n3"}
    third.world.register(replace(node("n3"), epoch=2))
    assert third.world.leaving == frozenset()
    await third.close()


async def test_nodes_of_others_stay_alive_without_redis(redis: EmbeddedRedis) -> None:
    now = 0.0
    writing, following = Recorder(redis, "writing"), Recorder(redis, "following", clock=lambda: now)
    await writing.write(node("n1"))
    await following.write(replace(node("w1"), cluster=ClusterName("west")))
    await until(lambda: following.live() == ["n1", "w1"], what="the others' node")
    await redis.close()
    await until(lambda: following.replication.is_stale, what="no Redis")

    def has_tried_since() -> bool:
        member = following.world.membership.get(AgentName("n1"))
        return member is not None and member.last_report_at == now

    for _ in range(3):
        now += PATIENCE_SECONDS
        await until(has_tried_since, what="the next attempt")
        assert following.live() == ["n1"], "its own nodes speak to it, and w1 is silent"
    await writing.close()
    await following.close()


async def test_cluster_stays_known_until_its_snapshot_is_complete(redis: EmbeddedRedis) -> None:
    writing, following = Recorder(redis, "writing"), Recorder(redis, "following", clock=lambda: 0.0)
    await writing.write(node("n1"), node("n3"))
    await until(lambda: following.live() == ["n1", "n3"], what="the others' nodes")
    await writing.close()
    next_one = RedisStore(redis.url)
    lease = await next_one.acquire(EAST, owner="next:7410 x", seconds=PATIENCE_SECONDS)
    marker = StreamEntry(f"{lease.epoch}-1", RELOAD, b"")
    reloads = _num_reloads()
    await next_one.append(lease, [marker])
    await until(lambda: _num_reloads() > reloads, what="the break")
    assert following.live() == ["n1", "n3"]
    await next_one.write_snapshot(lease, covers=marker.id, chunks=_records(node("n1"), node("n2")))

    def has_replaced() -> bool:
        assert "n1" in following.live()
        return following.known() == ["n1", "n2"]

    await until(has_replaced, what="the snapshot")
    assert following.live() == ["n1"], "of n2 nothing has been heard"
    await next_one.close()
    await following.close()


async def test_cluster_without_a_writer_is_forgotten_until_it_has_one(redis: EmbeddedRedis) -> None:
    now = 0.0
    writing, following = Recorder(redis, "writing"), Recorder(redis, "following", clock=lambda: now)
    await writing.write(node("n1"))
    await until(lambda: following.live() == ["n1"], what="the other's node")
    await writing.close()

    def is_forgotten_later() -> bool:  # Its last figures may still arrive.
        nonlocal now
        now += FORGET_SECONDS
        return following.known() == []

    await until(is_forgotten_later, what="the end of a cluster without a writer")
    again = Recorder(redis, "again")
    await again.write(node("n2"))
    await until(lambda: following.known() == ["n1", "n2"], what="the cluster that is written again")
    await again.close()
    await following.close()


def _num_reloads() -> float:
    return REGISTRY.get_sample_value("prfaas_manager_reloads_total") or 0.0


async def _records(*nodes: Node) -> AsyncIterator[bytes]:
    for registered in nodes:
        yield node_record(registered)


async def _until_there(ask: Callable[[], Awaitable[object]]) -> None:
    while not await ask():  # noqa: ASYNC110 - asked of Redis
        await asyncio.sleep(POLL_SECONDS)


class Endless(World):
    """A memory of which a snapshot has no end until it may have one."""

    has_begun = may_end = False

    def records(self, cluster: ClusterName) -> Iterator[bytes]:
        self.has_begun = True
        while not self.may_end:
            yield node_record(node("n1"))


Snapshotting = tuple[RedisStore, Endless, ClusterWriter]


@pytest.fixture
async def snapshotting(redis: EmbeddedRedis) -> AsyncIterator[Snapshotting]:
    """A writer that has not started, whose snapshots have no end until they may have one."""
    store = RedisStore(redis.url, timeout_seconds=PATIENCE_SECONDS)
    world = Endless(expiry_seconds=PATIENCE_SECONDS, clock=asyncio.get_running_loop().time)
    writer = ClusterWriter(
        EAST, store=store, world=world, owner="first:7410 x", lease_seconds=PATIENCE_SECONDS, forget_seconds=1800.0
    )
    yield store, world, writer
    await writer.close()
    await store.close()


async def test_batches_and_figures_are_written_during_a_snapshot(snapshotting: Snapshotting) -> None:
    store, world, writer = snapshotting
    lease = await store.acquire(EAST, owner="first:7410 x", seconds=PATIENCE_SECONDS)
    writer.start(lease, START_ID, behind=False)
    for _ in range(65):
        await writer.append(bytes(1 << 20))
    await until(lambda: world.has_begun, what="the snapshot")
    await store._client.delete(store.keys.figures(EAST))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await writer.append(node_record(node("n2")))
        await _until_there(lambda: store.get([EAST], store.keys.figures))
        assert await store.read_snapshot(EAST) == (START_ID, []), "it is still being written"
        world.may_end = True
        await _until_there(lambda: store._client.exists(store.keys.snapshot(EAST)))
    covers, _ = await store.read_snapshot(EAST)
    (entry,) = await store.tail(EAST, covers)
    assert (entry.before, entry.data) == (covers, node_record(node("n2")))


async def test_snapshot_completes_under_a_renewed_lease(snapshotting: Snapshotting) -> None:
    store, world, writer = snapshotting
    writer._published_at = float("inf")  # Figures under an ended lease would end the writer.
    lease = await store.acquire(EAST, owner="first:7410 x", seconds=PATIENCE_SECONDS)
    writer.start(lease, START_ID, behind=True)
    await until(lambda: world.has_begun, what="the snapshot")
    await store._client.delete(store.keys.lease(EAST))  # As if this manager had been suspended for long.

    async def has_ended() -> object:
        return writer.lost.is_set() or await store._client.exists(store.keys.snapshot(EAST))

    async with asyncio.timeout(PATIENCE_SECONDS):
        await _until_there(lambda: store._client.exists(store.keys.lease(EAST)))
        world.may_end = True
        await _until_there(has_ended)
        assert not writer.lost.is_set(), "nobody else has written the cluster"
        await writer.append(node_record(node("n2")))
    covers, _ = await store.read_snapshot(EAST)
    (entry,) = await store.tail(EAST, covers)
    assert entry.data == node_record(node("n2"))
