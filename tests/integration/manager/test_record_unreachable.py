"""Redis is full, or cut off from one of two managers: answers continue, and the record catches up."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from prfaas.index.store.redis_store import RedisStore
from prfaas.manager.record.embedded_redis import EmbeddedRedis
from prfaas.types import ClusterName
from tests.support.deployment import Deployment, chain_of, hybrid_layout, stored, until_usable
from tests.support.waiting import PATIENCE_SECONDS, until

LAYOUT = hybrid_layout()


class Relay:
    """A TCP port before a Redis's Unix socket, which can be cut and mended."""

    def __init__(self, redis: EmbeddedRedis) -> None:
        self._path = redis.url.removeprefix("unix://")
        self._server: asyncio.Server | None = None
        self._port = 0
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        assert self._server is not None, "whole until now"
        self._server.close()
        for writer in list(self._writers):
            writer.close()
        await asyncio.sleep(0)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        beyond_reader, beyond_writer = await asyncio.open_unix_connection(self._path)
        managers_writers = {writer, beyond_writer}
        self._writers |= managers_writers
        try:
            await asyncio.gather(_copy(reader, beyond_writer), _copy(beyond_reader, writer))
        finally:
            self._writers -= managers_writers


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@pytest.fixture
async def redis(deployment: Deployment) -> EmbeddedRedis:
    return await deployment.start_redis()


@pytest.fixture
async def relay(redis: EmbeddedRedis) -> AsyncIterator[Relay]:
    made = Relay(redis)
    await made.mend()
    yield made
    await made.cut()


async def test_record_catches_up_once_a_full_redis_has_room(deployment: Deployment, redis: EmbeddedRedis) -> None:
    manager = await deployment.start_manager()
    reporter = await deployment.node("n1", manager, holds=stored(LAYOUT, chain_of(640), 160))
    store = RedisStore(redis.url)
    await store._client.config_set("maxmemory", 1)
    reporter.publish(stored(LAYOUT, chain_of(640), 320))
    await until_usable(deployment.client(manager), chain_of(640), {"n1": 320})
    await until(lambda: not manager.replication.is_recording, what="OOM")
    await store._client.config_set("maxmemory", 0)
    await until(lambda: manager.replication.is_recording, what="the record with room")
    late = await deployment.start_manager()
    await until_usable(deployment.client(late), chain_of(640), {"n1": 320})
    await store.close()


async def test_writer_without_redis_keeps_answering_and_loses_nothing(
    deployment: Deployment, redis: EmbeddedRedis, relay: Relay
) -> None:
    cut_off = await deployment.start_manager(redis_url=relay.url, lease_seconds=1.0)  # Redis ends this lease soon.
    connected = await deployment.start_manager()
    reporter = await deployment.node("n1", cut_off, connected, holds=stored(LAYOUT, chain_of(640), 160))
    await until_usable(deployment.client(connected), chain_of(640), {"n1": 160})
    await relay.cut()
    reporter.publish(stored(LAYOUT, chain_of(640), 320))
    await until_usable(deployment.client(cut_off), chain_of(640), {"n1": 320})
    await until(lambda: not cut_off.replication.is_recording, what="the split")
    store = RedisStore(redis.url)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await store.writer(ClusterName("east")) is not None:  # noqa: ASYNC110 - Redis ends the lease
            await asyncio.sleep(0.02)
    await store.close()
    await deployment.node("n2", connected, holds=stored(LAYOUT, chain_of(640), 480))
    await until(lambda: connected.replication.num_written == 1, what="the other side's writer")
    await relay.mend()
    await until(lambda: cut_off.replication.num_written == 0, what="the cut-off writer's giving way")
    for manager in (cut_off, connected):
        await until_usable(deployment.client(manager), chain_of(640), {"n1": 320, "n2": 480})
