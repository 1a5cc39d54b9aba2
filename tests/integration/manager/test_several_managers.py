"""Several managers share one Redis: one writes a cluster, all answer, and any of them can leave."""

from collections.abc import AsyncIterator

import pytest

from prfaas.errors import FencedError
from prfaas.index.store.redis_store import START_ID, Keys, RedisStore, StreamEntry
from prfaas.manager.record.cluster_writer import RELOAD
from prfaas.types import ClusterName
from tests.support.deployment import Deployment, chain_of, hybrid_layout, stored, until_usable
from tests.support.waiting import PATIENCE_SECONDS, until

LAYOUT = hybrid_layout()
EAST = ClusterName("east")


async def test_agent_is_redirected_to_the_writer(deployment: Deployment) -> None:
    await deployment.start_redis()
    first, second = await deployment.start_manager(), await deployment.start_manager()
    first_reporter = await deployment.node("n1", first)
    await until(lambda: first_reporter.status.manager == first.address)
    second_reporter = await deployment.node("n2", second)
    await until(lambda: second_reporter.status.manager == first.address, what="the redirect")


async def test_second_manager_takes_over_with_the_record(deployment: Deployment) -> None:
    await deployment.start_redis()
    first, second = await deployment.start_manager(), await deployment.start_manager()
    reporter = await deployment.node("n1", first, second, holds=stored(LAYOUT, chain_of(640), 320))
    await deployment.stop_manager(first)
    await until(lambda: reporter.status.manager == second.address, what="the move to the other manager")
    await until_usable(deployment.client(second), chain_of(640), {"n1": 320})
    assert reporter.status.num_full_announcements == 0, "the record was enough"
    reporter.publish(stored(LAYOUT, chain_of(640), 640))
    await until_usable(deployment.client(second), chain_of(641), {"n1": 640})


async def test_empty_redis_is_filled_from_memory(deployment: Deployment) -> None:
    redis = await deployment.start_redis()
    first, second = await deployment.start_manager(), await deployment.start_manager()
    reporter = await deployment.node("n1", first, holds=stored(LAYOUT, chain_of(640), 320))
    await until_usable(deployment.client(second), chain_of(640), {"n1": 320})
    store = RedisStore(redis.url)
    await store._client.flushall()
    await store.close()
    reporter.publish(stored(LAYOUT, chain_of(640), 640))
    await until_usable(deployment.client(second), chain_of(641), {"n1": 640})


async def test_late_write_of_a_fenced_writer_is_refused(deployment: Deployment) -> None:
    redis = await deployment.start_redis()
    store = RedisStore(redis.url, keys=Keys("fencing"))
    old = await store.acquire(EAST, owner="a:1 x", seconds=PATIENCE_SECONDS)
    await store.append(old, [StreamEntry(f"{old.epoch}-1", START_ID, b"early")])
    with pytest.raises(FencedError) as refusal:
        await store.acquire(EAST, owner="b:1 y", seconds=PATIENCE_SECONDS)
    assert refusal.value.writer == "a:1"
    await end_lease(store)
    new = await store.acquire(EAST, owner="b:1 y", seconds=PATIENCE_SECONDS)
    assert new.epoch > old.epoch
    assert new.epoch_before == old.epoch
    with pytest.raises(FencedError):
        await store.append(old, [StreamEntry(f"{old.epoch}-2", f"{old.epoch}-1", b"late")])
    with pytest.raises(FencedError):
        await store.put(old, store.keys.figures(EAST), b"late", seconds=1)
    with pytest.raises(FencedError):
        await store.write_snapshot(old, covers=f"{old.epoch}-1", chunks=_late_chunks())
    assert [entry.data for entry in await store.tail(EAST, START_ID)] == [b"early"]
    await store.close()


async def _late_chunks() -> AsyncIterator[bytes]:
    yield b"late"


async def test_restarted_manager_takes_its_own_lease_at_once(deployment: Deployment) -> None:
    redis = await deployment.start_redis()
    store = RedisStore(redis.url)
    killed = await store.acquire(EAST, owner="a:1 x", seconds=60)
    anew = await store.acquire(EAST, owner="a:1 y", seconds=60)
    assert anew.epoch > killed.epoch
    with pytest.raises(FencedError):
        await store.append(killed, [StreamEntry(f"{killed.epoch}-1", START_ID, b"late")])
    with pytest.raises(FencedError):
        await store.acquire(EAST, owner="a:10 y", seconds=60)
    await store.close()


async def test_next_writer_ends_a_break_in_the_record(deployment: Deployment) -> None:
    redis = await deployment.start_redis()
    store = RedisStore(redis.url)
    killed = await store.acquire(EAST, owner="a:1 x", seconds=PATIENCE_SECONDS)
    await store.append(killed, [StreamEntry(f"{killed.epoch}-1", RELOAD, b"")])
    await end_lease(store)
    await store.close()
    first = await deployment.start_manager()
    await deployment.node("n1", first, holds=stored(LAYOUT, chain_of(640), 320))
    second = await deployment.start_manager()
    await until_usable(deployment.client(second), chain_of(640), {"n1": 320})


async def end_lease(store: RedisStore) -> None:
    """As Redis does when its time is over."""
    await store._client.delete(store.keys.lease(EAST))
