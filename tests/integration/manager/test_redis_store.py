"""Record in a real Redis: bounded replies, and snapshots that were never completed."""

from collections.abc import AsyncIterator

import pytest

from prfaas.errors import RecordUnreachable
from prfaas.index.store.redis_store import START_ID, RedisStore, StreamEntry, WriterLease
from prfaas.manager.record.embedded_redis import EmbeddedRedis
from prfaas.types import ClusterName
from tests.support.deployment import Deployment
from tests.support.waiting import PATIENCE_SECONDS

EAST = ClusterName("east")
FULL = bytes(150 << 10)  # A batch of full segments.


@pytest.fixture
async def redis(deployment: Deployment) -> EmbeddedRedis:
    return await deployment.start_redis()


@pytest.fixture
async def store(redis: EmbeddedRedis) -> AsyncIterator[RedisStore]:
    store = RedisStore(redis.url)
    yield store
    await store.close()


async def _lease(store: RedisStore) -> WriterLease:
    return await store.acquire(EAST, owner="a:1 x", seconds=PATIENCE_SECONDS)


async def _chunks(count: int) -> AsyncIterator[bytes]:
    for number in range(count):
        yield b"%d" % number


async def _append(store: RedisStore, lease: WriterLease, *data: bytes) -> None:
    ids = [f"{lease.epoch}-{number}" for number in range(1, len(data) + 1)]
    entries = [StreamEntry(*fields) for fields in zip(ids, [START_ID, *ids], data, strict=False)]
    for start in range(0, len(data), 50):
        await store.append(lease, entries[start : start + 50])


async def test_snapshot_is_read_in_several_replies(store: RedisStore) -> None:
    lease = await _lease(store)
    await store.write_snapshot(lease, covers="1-0", chunks=_chunks(40))
    assert await store.read_snapshot(EAST) == ("1-0", [b"%d" % number for number in range(40)])
    stats = await store._client.info("commandstats")
    assert stats["cmdstat_lrange"]["calls"] >= 3


async def test_replaced_snapshot_is_read_again(store: RedisStore) -> None:
    lease = await _lease(store)
    await store.write_snapshot(lease, covers="1-0", chunks=_chunks(40))
    lrange, num_calls = store._client.lrange, 0

    async def replaced(*arguments: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            await store.write_snapshot(lease, covers="2-0", chunks=_chunks(20))
        return await lrange(*arguments)

    store._client.lrange = replaced
    assert await store.read_snapshot(EAST) == ("2-0", [b"%d" % number for number in range(20)])


async def test_reply_is_bounded_in_number_and_size(store: RedisStore) -> None:
    data = [b"small"] * 1000 + [FULL] * 40
    await _append(store, await _lease(store), *data)
    replies, position = [], START_ID
    while entries := await store.tail(EAST, position):
        replies.append(entries)
        position = entries[-1].id
    assert [entry.data for entries in replies for entry in entries] == data
    assert len(replies[0]) > 500
    assert max(sum(len(entry.data) for entry in entries) for entries in replies) < 3 << 20


async def test_awaited_entries_are_bounded_in_number_and_size(store: RedisStore) -> None:
    await _append(store, await _lease(store), *[b"small"] * 300, *[FULL] * 60)
    found = (await store.read({EAST: START_ID}, wait_seconds=1.0))[EAST]
    assert len(found) > 300
    assert [entry.before for entry in found[1:]] == [entry.id for entry in found[:-1]]
    assert sum(len(entry.data) for entry in found) < 3 << 20


async def test_incomplete_snapshots_disappear(store: RedisStore) -> None:
    lease = await _lease(store)
    left: list[int] = []

    async def failing() -> AsyncIterator[bytes]:
        yield b"one"
        (name,) = await store._client.keys("*snapshot:*")
        left.append(await store._client.ttl(name))
        raise RecordUnreachable("full")

    with pytest.raises(RecordUnreachable, match="full"):
        await store.write_snapshot(lease, covers="1-0", chunks=failing())
    assert 0 < left[0] <= 120
    assert await store._client.keys("*snapshot*") == []
