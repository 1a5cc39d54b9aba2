"""Redis Cluster of two servers: managers read streams of several slots, and follow a slot that moves."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from prfaas.index.store.redis_store import START_ID, Keys, RedisStore, StreamEntry
from prfaas.manager.record.embedded_redis import find_server
from prfaas.types import ClusterName
from tests.support.deployment import Deployment, chain_of, hybrid_layout, stored, until_usable
from tests.support.waiting import wait_until
from tools.free_ports import free_address

LAYOUT = hybrid_layout()
NUM_SLOTS, BUS_OFFSET = 16384, 10_000
EAST, WEST = ClusterName("east"), ClusterName("west")


class Slots:
    """Two servers of one Redis Cluster; at first all slots are on the first one."""

    def __init__(self, directory: Path) -> None:
        self.ports = [_free_port() for _ in range(2)]
        self._processes = [self._start(directory / str(port), port) for port in self.ports]
        self._servers: list[Any] = [redis.Redis(port=port, decode_responses=True) for port in self.ports]
        self.url = f"redis+cluster://127.0.0.1:{self.ports[0]},127.0.0.1:{self.ports[1]}"

    def _start(self, directory: Path, port: int) -> subprocess.Popen[bytes]:
        directory.mkdir()
        options = ("--port", str(port), "--cluster-enabled", "yes", "--save", "")
        return subprocess.Popen([find_server(), *options], cwd=directory, stdout=subprocess.DEVNULL)

    def join(self) -> None:
        """Make the two one cluster; returns when it serves."""
        first, second = self._servers
        wait_until(lambda: all(map(_answers, self._servers)), what="the servers")
        first.execute_command("CLUSTER", "ADDSLOTS", *range(NUM_SLOTS))
        first.execute_command("CLUSTER", "MEET", "127.0.0.1", self.ports[1])
        wait_until(lambda: all(map(_serves, (first, second))), what="the cluster")

    def move(self, key: str) -> None:
        """Move the slot of `key` to the second server, with all that lies on it."""
        first, second = self._servers
        slot = first.execute_command("CLUSTER", "KEYSLOT", key)
        second.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", first.execute_command("CLUSTER", "MYID"))
        there = second.execute_command("CLUSTER", "MYID")
        first.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", there)
        while keys := first.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            first.execute_command("MIGRATE", "127.0.0.1", self.ports[1], "", 0, 5000, "KEYS", *keys)
        for server in (second, first):
            server.execute_command("CLUSTER", "SETSLOT", slot, "NODE", there)

    def has(self, place: int, key: str) -> bool:
        """Return whether the server itself has a key."""
        try:
            return bool(self._servers[place].exists(key))
        except redis.RedisError:
            return False

    def close(self) -> None:
        for server, process in zip(self._servers, self._processes, strict=True):
            server.close()
            process.kill()
            process.wait()


def _free_port() -> int:
    """One whose bus, `BUS_OFFSET` above it, is free as well."""
    while True:
        port = int(free_address().rpartition(":")[2])
        with socket.socket() as bus, contextlib.suppress(OSError, OverflowError):
            bus.bind(("127.0.0.1", port + BUS_OFFSET))
            return port


def _answers(server: Any) -> bool:
    try:
        return bool(server.ping())
    except redis.RedisError:
        return False


def _serves(server: Any) -> bool:
    return "cluster_state:ok" in server.execute_command("CLUSTER", "INFO")


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slots]:
    started = Slots(tmp_path_factory.mktemp("slots"))
    try:
        started.join()
        yield started
    finally:
        started.close()


async def test_streams_of_several_slots_are_read(slots: Slots) -> None:
    store = RedisStore(slots.url, keys=Keys("spread"))
    await store.check()
    leases = {name: await store.acquire(name, owner="127.0.0.1:1 a", seconds=30) for name in (EAST, WEST)}
    ids = {name: f"{lease.epoch}-1" for name, lease in leases.items()}
    first = {name: StreamEntry(ids[name], START_ID, name.encode()) for name in leases}
    positions = {EAST: START_ID, WEST: START_ID}
    await store.append(leases[WEST], [first[WEST]])
    assert await store.read(positions, wait_seconds=5) == {WEST: [first[WEST]]}
    positions[WEST] = ids[WEST]
    await store.append(leases[EAST], [first[EAST]])
    assert await store.read(positions, wait_seconds=5) == {EAST: [first[EAST]]}
    assert await store.read({EAST: ids[EAST]}, wait_seconds=0.01) == {}
    assert await store.read({EAST: START_ID, WEST: ids[WEST]}, wait_seconds=5) == {EAST: [first[EAST]]}
    await store.close()


async def test_managers_follow_a_slot_that_moves(deployment: Deployment, slots: Slots) -> None:
    writer = await deployment.start_manager(redis_url=slots.url)
    follower = await deployment.start_manager(redis_url=slots.url)
    reporters = {
        name: deployment.reporter(name, writer, cluster=cluster) for name, cluster in (("n1", EAST), ("n2", WEST))
    }
    for reporter in reporters.values():
        deployment.run(reporter)
        reporter.publish(stored(LAYOUT, chain_of(640), 160))
    await until_usable(deployment.client(follower), chain_of(640), {"n1": 160, "n2": 160})
    slots.move(Keys().events(EAST))
    reporters["n1"].publish(stored(LAYOUT, chain_of(640), 320))
    await until_usable(deployment.client(follower), chain_of(640), {"n1": 320, "n2": 160})
    assert slots.has(1, Keys().events(EAST)) and slots.has(0, Keys().events(WEST))
    late = await deployment.start_manager(redis_url=slots.url)
    await until_usable(deployment.client(late), chain_of(640), {"n1": 320, "n2": 160})
