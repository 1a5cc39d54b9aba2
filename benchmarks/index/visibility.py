"""From a change of a pool to an answer that knows of it: one agent's reporter, two managers, look-ups going on.

The agent publishes in a process of its own and by the clock, late or not. This process asks for some prompts, as routers
do and from the moment that they are due on, until they are answered in full: a figure holds the reporter's gathering,
both managers' work, Redis, and the last question's round trip.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from benchmarks.index.deployment import HASH, MODEL, layout, node
from benchmarks.index.in_process import percentiles
from benchmarks.index.over_grpc import Managed, register
from prfaas.manager.record.embedded_redis import EmbeddedRedis
from prfaas.pool_events import BlocksStored
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.reporter import Reporter
from prfaas.rpc.tasks import cancel_tasks
from prfaas.types import BlockHash

BLOCKS_PER_PUBLISH = 500
PUBLISHES_PER_SECOND = 100  # 50,000 blocks a second
SECONDS = 30
SAMPLED = 5  # Every fifth prompt is awaited, at the writing and at the following manager in turn.
LOOKUPS_PER_SECOND = 200
WARM_UP_SECONDS = 0.5
GIVE_UP_SECONDS = 5.0
BAR_MICROSECONDS = 20_000


async def measure(ports: tuple[int, int]) -> dict[str, Any]:
    """Publish for `SECONDS`, and see when both managers know."""
    with TemporaryDirectory(prefix="prfaas-bench-") as path:
        redis = EmbeddedRedis(Path(path) / "redis")
        await redis.start()
        managers = [Managed(Path(path), redis.url, port) for port in ports]
        try:
            return await _measure(managers)
        finally:
            for manager in managers:
                manager.kill()
            await redis.close()


async def _measure(managers: list[Managed]) -> dict[str, Any]:
    writer, follower = (manager.client("router") for manager in managers)
    first = managers[0].channel("n0")
    await register(first, layout(hybrid=False))  # This manager writes the agent's cluster from here on.
    await first.close()
    gc.freeze()  # As the server does, so that pauses of this process do not count.
    spawn = multiprocessing.get_context("spawn")
    parent_end, child_end = spawn.Pipe()
    agent = spawn.Process(target=publish, args=(managers[0].address, managers[0].secret, child_end))
    agent.start()
    await asyncio.to_thread(parent_end.recv)  # The child is connected.
    begin = time.perf_counter() + WARM_UP_SECONDS
    parent_end.send(begin)
    lookups = asyncio.create_task(_look_up(follower, begin))
    try:
        waits = [
            _visible((writer, follower)[number // SAMPLED % 2], number, begin + number / PUBLISHES_PER_SECOND)
            for number in range(0, SECONDS * PUBLISHES_PER_SECOND, SAMPLED)
        ]
        seconds = await asyncio.gather(*waits)
        asked = await lookups
    finally:
        await cancel_tasks((lookups,))
        agent.terminate()
        agent.join()
        await writer.close()
        await follower.close()
    return {
        "published_blocks_per_second": BLOCKS_PER_PUBLISH * PUBLISHES_PER_SECOND,
        "lookups_per_second": LOOKUPS_PER_SECOND,
        "samples": len(seconds),
        "samples_given_up": sum(second > GIVE_UP_SECONDS for second in seconds),
        "bars": {"p99_microseconds": BAR_MICROSECONDS},
        "visible_at_the_writer": percentiles(seconds[::2]),
        "visible_at_another_manager": percentiles(seconds[1::2]),
        "lookups_meanwhile": percentiles(asked),
    }


def publish(address: str, secret: bytes, told: Connection) -> None:
    """The agent's process: every prompt at its time."""
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_publish(address, secret, told))


async def _publish(address: str, secret: bytes, told: Connection) -> None:
    node_layout = layout(hybrid=False)
    reporter = Reporter([address], node=node(0, node_layout), secret=secret)
    reporting = asyncio.create_task(reporter.run())
    while reporter.status.manager is None:  # noqa: ASYNC110 - the reporter tells nobody
        await asyncio.sleep(0.01)
    told.send("connected")
    begin: float = await asyncio.to_thread(told.recv)
    for number in range(SECONDS * PUBLISHES_PER_SECOND):
        hashes = _hashes(number)
        blocks = tuple(BlockHash(hashes[at : at + HASH]) for at in range(0, len(hashes), HASH))
        stored = BlocksStored(node_layout.fingerprint, 0, blocks, BlockHash(bytes(HASH)), 16, 16)
        await asyncio.sleep(begin + number / PUBLISHES_PER_SECOND - time.perf_counter())
        reporter.publish((stored,))
    await asyncio.sleep(GIVE_UP_SECONDS)
    await cancel_tasks((reporting,))


def _hashes(number: int) -> bytes:
    """Return the tokens of prompt `number`, equal in both processes."""
    return random.Random(number).randbytes(BLOCKS_PER_PUBLISH * HASH)


async def _visible(manager: ManagerClient, number: int, due: float) -> float:
    """Return seconds from when a prompt is due until it is answered in full, or until that is waited for no longer."""
    await asyncio.sleep(due - time.perf_counter())
    request = _match(number)
    while True:
        response = await manager.match(request)
        now = time.perf_counter()
        if response.nodes and response.nodes[0].attention_tokens >= request.limit_tokens:
            return now - due
        if now > due + GIVE_UP_SECONDS:
            return now - due  # A lower bound.
        await asyncio.sleep(0.001)


async def _look_up(manager: ManagerClient, begin: float) -> list[float]:
    """Ask for prompts that are known by then, by the clock; returns how long each answer took."""
    seconds = []
    for number in range(LOOKUPS_PER_SECOND * SECONDS):
        due = begin + number / LOOKUPS_PER_SECOND
        await asyncio.sleep(due - time.perf_counter())
        started = time.perf_counter()
        await manager.match(_match(number % 10))
        seconds.append(time.perf_counter() - started)
    return seconds


def _match(number: int) -> pb.MatchRequest:
    return pb.MatchRequest(model=MODEL, units=_hashes(number), limit_tokens=BLOCKS_PER_PUBLISH * 16)
