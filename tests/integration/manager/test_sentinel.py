"""Redis failover by a Sentinel: old blocks still match, and new ones are recorded."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from prfaas.errors import RecordUnreachable
from prfaas.index.store.redis_store import RedisStore
from tests.integration.manager.replicated_redis import ReplicatedRedis
from tests.support.deployment import Deployment, chain_of, hybrid_layout, stored, until_usable
from tests.support.waiting import until

LAYOUT = hybrid_layout()


@pytest.fixture
async def replicated(tmp_path: Path) -> AsyncIterator[ReplicatedRedis]:
    started = ReplicatedRedis(tmp_path)
    try:
        await asyncio.to_thread(started.watch)
        yield started
    finally:
        await asyncio.to_thread(started.close)


async def test_record_survives_a_failover(deployment: Deployment, replicated: ReplicatedRedis) -> None:
    manager = await deployment.start_manager(redis_url=replicated.url)
    reporter = await deployment.node("n1", manager, holds=stored(LAYOUT, chain_of(640), 160))
    replicated.master.kill()
    await until_usable(deployment.client(manager), chain_of(640), {"n1": 160})
    reporter.publish(stored(LAYOUT, chain_of(640), 320))
    await until(lambda: not manager.replication.is_recording, what="the loss of the master")
    await asyncio.to_thread(replicated.give_up_the_master)
    await until(lambda: manager.replication.is_recording, what="the failover")
    late = await deployment.start_manager(redis_url=replicated.url)
    await until_usable(deployment.client(late), chain_of(640), {"n1": 320})


async def test_user_of_the_url_is_that_of_the_master(replicated: ReplicatedRedis) -> None:
    with redis.Redis(port=replicated.ports[0]) as master:
        master.execute_command("ACL", "SETUSER", "manager", "on", ">p@ss", "~*", "+@all")
    for password, is_right in (("p%40ss", True), ("wrong", False)):
        store = RedisStore(replicated.url.replace("://", f"://manager:{password}@"))
        with contextlib.nullcontext() if is_right else pytest.raises(RecordUnreachable, match="invalid"):
            await store.check()
        await store.close()
