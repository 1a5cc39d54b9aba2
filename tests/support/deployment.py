"""Managers, Redis and reporters of one test, on loopback, with prompts and pool changes for them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from prfaas.errors import IndexRefusal, ManagerUnreachable
from prfaas.hashing import HashChain, root_hash
from prfaas.index.membership import Engine, Figures, Node
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.manager.config import ManagerConfig
from prfaas.manager.daemon import Manager
from prfaas.manager.record.embedded_redis import EmbeddedRedis
from prfaas.pool_events import BlockRemoved, BlockStored, PoolEvent
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.reporter import Reporter
from prfaas.rpc.tasks import cancel_tasks
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole, Shard
from tests.support.waiting import PATIENCE_SECONDS, POLL_SECONDS, until
from tools.free_ports import free_address

SECRET = bytes(range(32))
MODEL = "tiny"


def hybrid_layout(model: str = MODEL) -> Layout:
    layers = (LayerSlice("layer", 0, 64, "bfloat16", "token"),)
    return Layout(model, "", Shard(), (KVGroup("full_attention", 16, layers), KVGroup("linear_state", 0, layers)))


def chain_of(num_tokens: int, *, seed: int = 0, model: str = MODEL, salt: bytes = b"") -> HashChain:
    return HashChain(root_hash(model, salt), [(seed * 7919 + position) % 50_000 for position in range(num_tokens)])


def stored(layout: Layout, chain: HashChain, length: int, *, state: bool = True) -> list[PoolEvent]:
    """Return the events of all full blocks of the first `length` tokens, and of the state at that length."""
    events: list[PoolEvent] = [
        BlockStored(layout.fingerprint, 0, chain.at(end), chain.at(end - 16), end) for end in range(16, length + 1, 16)
    ]
    if state:
        anchor = chain.at(length - length % 16)
        events.append(BlockStored(layout.fingerprint, 1, chain.at(length), anchor, length))
    return events


def removed(layout: Layout, chain: HashChain, end: int) -> list[PoolEvent]:
    return [BlockRemoved(layout.fingerprint, 0, chain.at(end))]


def match_request(chain: HashChain, *, stated: tuple[int, ...] = (), model: str = MODEL) -> pb.MatchRequest:
    return pb.MatchRequest(
        model=model,
        units=b"".join(chain.units),
        limit_tokens=chain.num_tokens - 1,
        checkpoints=[pb.StatedCheckpoint(num_tokens=length, hash=chain.at(length)) for length in stated],
    )


class Deployment:
    """Managers, Redis and reporters of one test. All end with the context."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = AsyncExitStack()
        self.redis: EmbeddedRedis | None = None
        self.managers: list[Manager] = []
        self.reporters: dict[str, Reporter] = {}
        self._epoch = 0
        self.secret_file = directory / "secret"
        self.secret_file.touch(mode=0o600)
        self.secret_file.write_bytes(SECRET)

    async def __aenter__(self) -> Deployment:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start_redis(self) -> EmbeddedRedis:
        self.redis = EmbeddedRedis(self.directory / "redis")
        await self.redis.start()
        self._stack.push_async_callback(self.redis.close)
        return self.redis

    def config(self, **changes: object) -> ManagerConfig:
        config = ManagerConfig(
            listen=free_address(),
            http_listen="127.0.0.1:0",
            secret_file=self.secret_file,
            redis_url=self.redis.url if self.redis else "",
            silence_seconds=PATIENCE_SECONDS / 2,  # No node may be silent because this machine is slow.
            expiry_seconds=PATIENCE_SECONDS,
        )
        return replace(config, **changes)  # type: ignore[arg-type]

    async def start_manager(self, **changes: Any) -> Manager:
        """Start a manager with these settings. Lease, stop and digest seconds and the clock are not settings."""
        # Streams of clients end only with the clients, so a short stop cuts them off.
        times: dict[str, Any] = {"lease_seconds": PATIENCE_SECONDS, "stop_seconds": 0.2, "digest_seconds": 0.2}
        times |= {"wall_clock": time.time}
        times |= {name: changes.pop(name) for name in times if name in changes}
        manager = Manager(self.config(**changes), SECRET, **times)
        await manager.start()
        self.managers.append(manager)
        self._stack.push_async_callback(self._close_manager, manager)
        return manager

    async def _close_manager(self, manager: Manager) -> None:
        if manager in self.managers:
            await self.stop_manager(manager)

    async def stop_manager(self, manager: Manager) -> None:
        self.managers.remove(manager)
        await manager.close()

    def client(self, *managers: Manager, name: str = "router", deadline_seconds: float = 1.0) -> ManagerClient:
        addresses = [manager.address for manager in managers]
        client = ManagerClient(addresses, name=name, secret=SECRET, deadline_seconds=deadline_seconds)
        self._stack.push_async_callback(client.close)
        return client

    def reporter(
        self,
        name: str,
        *managers: Manager,
        cluster: str = "east",
        kind: ClusterKind = "pd",
        role: InstanceRole = "both",
        addresses: tuple[str, ...] = (),
        figures: Figures | Callable[[], Figures] | None = None,
        epoch: int | None = None,
    ) -> Reporter:
        """Return a reporter of a node with one engine, to be run with `run`."""
        self._epoch += 1
        engine = Engine(InstanceId(f"{name}-engine"), f"http://{name}:8000", role, MODEL)
        node = Node(
            AgentName(name),
            ClusterName(cluster),
            kind,
            f"{name}:7400",
            epoch or self._epoch,
            (hybrid_layout(),),
            (engine,),
        )
        targets = addresses or tuple(manager.address for manager in managers)
        return Reporter(
            targets, node=node, secret=SECRET, figures=(lambda: figures) if isinstance(figures, Figures) else figures
        )

    async def node(self, name: str, *managers: Manager, holds: Sequence[PoolEvent] = (), **fields: Any) -> Reporter:
        """Start a node's reporter, and return it once a manager has registered the node and knows what it `holds`."""
        reporter = self.reporter(name, *managers, **fields)
        self.run(reporter)
        reporter.publish(holds)
        await until(lambda: reporter.status.manager is not None, what=name)
        await until(
            lambda: not holds or 0 < reporter.status.sequence == reporter.status.acknowledged, what="its blocks"
        )
        return reporter

    def run(self, reporter: Reporter) -> asyncio.Task[None]:
        task = asyncio.create_task(reporter.run())
        self._stack.push_async_callback(self.end, task)
        return task

    @staticmethod
    async def end(task: asyncio.Task[None]) -> None:
        await cancel_tasks((task,))


def kill(pid: int | None) -> None:
    assert pid is not None
    with suppress(ProcessLookupError):  # The process is being restarted.
        os.kill(pid, signal.SIGKILL)


async def usable(client: ManagerClient, chain: HashChain, *, stated: tuple[int, ...] = ()) -> dict[str, int]:
    """Return the usable tokens of each node."""
    response = await client.match(match_request(chain, stated=stated))
    return {match.node: match.usable_tokens for match in response.nodes}


async def until_usable(
    client: ManagerClient, chain: HashChain, expected: dict[str, int], *, seconds: float = PATIENCE_SECONDS
) -> None:
    """Repeat the query until the answer is as expected. Raise AssertionError after `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while (found := await _usable_or_none(client, chain)) != expected:
        assert asyncio.get_running_loop().time() < deadline, f"{found} after {seconds} s, not {expected}"
        await asyncio.sleep(POLL_SECONDS)


async def _usable_or_none(client: ManagerClient, chain: HashChain) -> dict[str, int] | None:
    try:
        return await usable(client, chain)
    except (ManagerUnreachable, IndexRefusal):
        return None
