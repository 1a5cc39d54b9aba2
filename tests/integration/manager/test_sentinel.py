"""A Redis master with a replica and a Sentinel: after a failover the old blocks are still matched and new ones recorded."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from prfaas.errors import RecordUnreachable
from prfaas.index.redis_store import RedisStore
from prfaas.manager.embedded_redis import find_server
from tests.integration.manager.deployment import Deployment, chain_of, hybrid_layout, stored, until_usable
from tests.waiting import until, wait_until
from tools.free_ports import free_address

LAYOUT = hybrid_layout()
SENTINEL = """
port {port}
sentinel monitor main 127.0.0.1 {master} 1
sentinel down-after-milliseconds main 60000
sentinel failover-timeout main 3000
"""


class Replicated:
    """Master, replica, Sentinel, each a process on a free port."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.ports = [int(free_address().rpartition(":")[2]) for _ in range(3)]
        master, replica, sentinel = self.ports
        self.master = self._start("--port", str(master), "--save", "")
        self._others = [self._start("--port", str(replica), "--save", "", "--replicaof", "127.0.0.1", str(master))]
        self.url = f"redis+sentinel://127.0.0.1:{sentinel}/main"

    def watch(self) -> None:
        """Start the Sentinel, which asks a master for its replicas at first and then each 10 s, once there is one."""
        wait_until(self._is_copied, what="the replica")
        config = self._directory / "sentinel.conf"
        config.write_text(SENTINEL.format(port=self.ports[2], master=self.ports[0]))
        self._others.append(self._start(str(config), "--sentinel"))
        wait_until(self._is_watched, what="the Sentinel")

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([find_server(), *arguments], cwd=self._directory, stdout=subprocess.DEVNULL)

    def _is_copied(self) -> bool:
        """The replica has the master's data."""
        try:
            with redis.Redis(port=self.ports[1]) as replica:
                return bool(replica.info("replication")["master_link_status"] == "up")
        except redis.RedisError:
            return False

    def _is_watched(self) -> bool:
        """The Sentinel knows the replica."""
        try:
            with redis.Redis(port=self.ports[2]) as sentinel:
                return bool(sentinel.execute_command("SENTINEL", "REPLICAS", "main"))
        except redis.RedisError:
            return False

    def give_up_the_master(self) -> None:
        """Have the Sentinel act at once; until here a slow machine's silence was no death."""
        with redis.Redis(port=self.ports[2]) as sentinel:
            sentinel.execute_command("SENTINEL", "SET", "main", "down-after-milliseconds", 200)

    def close(self) -> None:
        for process in (self.master, *self._others):
            process.kill()
            process.wait()


@pytest.fixture
async def replicated(tmp_path: Path) -> AsyncIterator[Replicated]:
    started = Replicated(tmp_path)
    try:
        await asyncio.to_thread(started.watch)
        yield started
    finally:
        await asyncio.to_thread(started.close)


async def test_after_a_failover_old_blocks_are_matched_and_new_ones_recorded(
    deployment: Deployment, replicated: Replicated
) -> None:
    manager = await deployment.start_manager(redis_url=replicated.url)
    reporter = deployment.reporter("n1", manager)
    deployment.run(reporter)
    reporter.publish(stored(LAYOUT, chain_of(640), 160))
    await until(lambda: reporter.status.acknowledged >= 1)
    replicated.master.kill()
    await until_usable(deployment.client(manager), chain_of(640), {"n1": 160})
    reporter.publish(stored(LAYOUT, chain_of(640), 320))
    await until(lambda: not manager.replication.is_recording, what="the loss of the master")
    await asyncio.to_thread(replicated.give_up_the_master)
    await until(lambda: manager.replication.is_recording, what="the failover")
    late = await deployment.start_manager(redis_url=replicated.url)
    await until_usable(deployment.client(late), chain_of(640), {"n1": 320})


async def test_the_user_of_the_url_is_the_master_s(replicated: Replicated) -> None:
    with redis.Redis(port=replicated.ports[0]) as master:
        master.execute_command("ACL", "SETUSER", "manager", "on", ">p@ss", "~*", "+@all")
    for password, is_right in (("p%40ss", True), ("wrong", False)):
        store = RedisStore(replicated.url.replace("://", f"://manager:{password}@"))
        with contextlib.nullcontext() if is_right else pytest.raises(RecordUnreachable, match="invalid"):
            await store.check()
        await store.close()
