"""A manager process with its embedded Redis, asked over gRPC from this one; then restarted and read anew."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from benchmarks.index.deployment import BLOCKS_PER_PROMPT, MODEL, announcements, layout, node, prompt
from benchmarks.index.in_process import percentiles
from prfaas.errors import ManagerUnreachable
from prfaas.index.store.redis_store import RedisStore
from prfaas.manager.record.embedded_redis import EmbeddedRedis
from prfaas.rpc.channel import Channel
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.translate import batch_message, node_message
from tools.free_ports import free_address

CALLS = 2000
IN_FLIGHT = 16
SAMPLES = 100  # Prompts that must match in full after the restart.
BARS = {
    "announced_blocks_per_second_to_redis": 500_000,
    "redis_bytes_per_block": 20,
    "match_2000_blocks_p50_microseconds": 700,
    "match_2000_blocks_p99_microseconds": 2000,
    "matches_per_second": 3000,
    "restart_seconds": 20,
}
START_SECONDS = 60.0
AWAY_SECONDS = 3.0


class Managed:
    """One manager process on one Redis; those of one directory share a secret."""

    def __init__(self, directory: Path, redis_url: str, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._secret_file = directory / "secret"
        if not self._secret_file.exists():
            self._secret_file.touch(mode=0o600)
            self._secret_file.write_bytes(secrets.token_bytes(32))
        self.secret = self._secret_file.read_bytes()
        self._log = directory / f"manager-{port}.log"
        self._redis_url = redis_url
        self.start()

    def start(self) -> None:
        flags = ["--listen", self.address, "--http-listen", "127.0.0.1:0", "--secret-file", str(self._secret_file)]
        command = [sys.executable, "-m", "prfaas.cli.manager", *flags, "--redis-url", self._redis_url]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*command, "--expiry-seconds", "600s"], stdout=log, stderr=log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def channel(self, name: str) -> Channel:
        return Channel(self.address, name=name, secret=self.secret)

    def client(self, name: str) -> ManagerClient:
        return ManagerClient([self.address], name=name, secret=self.secret, deadline_seconds=5.0)


async def measure(*, num_blocks: int, port: int) -> dict[str, Any]:
    """Announce `num_blocks` blocks through one stream, ask, kill -9, ask again."""
    with TemporaryDirectory(prefix="prfaas-bench-") as path:
        redis = EmbeddedRedis(Path(path) / "redis")
        await redis.start()
        managed = Managed(Path(path), redis.url, port)
        store = RedisStore(redis.url)
        try:
            return await _measure(managed, redis, store, num_blocks)
        finally:
            managed.kill()
            await store.close()
            await redis.close()


async def _measure(managed: Managed, redis: EmbeddedRedis, store: RedisStore, num_blocks: int) -> dict[str, Any]:
    node_layout = layout(hybrid=True)
    agent, router = managed.channel("n0"), managed.channel("router")
    client = managed.client("router")
    await register(agent, node_layout)
    empty_bytes = await _redis_bytes(store)
    prompts = [prompt() for _ in range(num_blocks // BLOCKS_PER_PROMPT)]
    seconds = await _announce(agent, prompts, node_layout)
    stream_bytes = await _redis_bytes(store) - empty_bytes
    results = {
        "announced_blocks_per_second_to_redis": round(len(prompts) * BLOCKS_PER_PROMPT / seconds),
        "blocks": len(prompts) * BLOCKS_PER_PROMPT,
        "bars": BARS,
        "redis_bytes_per_block": round(stream_bytes / (len(prompts) * BLOCKS_PER_PROMPT), 1),
        "match_2000_blocks": await _call(client.match, [_match(prompt) for prompt in prompts[:50]]),
        "matches_per_second": await _rate(client.match, [_match(prompt) for prompt in prompts[:50]]),
        "nothing_call_by_call": await _nothing(managed.secret, [_match(prompt) for prompt in prompts[:50]]),
        "match_2000_blocks_call_by_call": await _call(
            partial(_unary, router), [_match(prompt) for prompt in prompts[:50]]
        ),
        "route_2000_blocks": await _call(client.route, [_route(prompt) for prompt in prompts[:50]]),
        "route_64_blocks": await _call(client.route, [_route(prompt[: 64 * 16]) for prompt in prompts[:50]]),
    }
    await client.close()
    managed.kill()
    started = time.perf_counter()
    managed.start()
    await agent.close()
    again = managed.channel("n0")
    await register(again, node_layout)
    for sample in prompts[:: max(1, len(prompts) // SAMPLES)]:
        await _until_matched(router, sample)
    results["restart_seconds"] = round(time.perf_counter() - started, 2)
    snapshot_bytes = await _snapshot_bytes(redis, node_layout, store) - empty_bytes
    results["redis_snapshot_bytes_per_block"] = round(snapshot_bytes / (len(prompts) * BLOCKS_PER_PROMPT), 1)
    await again.close()
    await router.close()
    return results


async def _snapshot_bytes(redis: EmbeddedRedis, node_layout: Any, store: RedisStore) -> int:
    """Return the bytes in Redis after an outage, when the writer has written a snapshot and no stream."""
    snapshot = store.keys.snapshot(node(0, node_layout).cluster)
    async with Redis.from_url(redis.url) as client:
        before = await client.hget(snapshot, "generation")
        assert redis.pid is not None, "it runs"
        os.kill(redis.pid, signal.SIGSTOP)
        await asyncio.sleep(AWAY_SECONDS)
        os.kill(redis.pid, signal.SIGCONT)
        deadline = time.perf_counter() + START_SECONDS
        while await _generation(client, snapshot) in (None, before):
            assert time.perf_counter() < deadline, "no snapshot was written"
            await asyncio.sleep(0.1)
    return await _redis_bytes(store)


async def _generation(client: Redis, snapshot: str) -> bytes | str | None:
    """Return the key of the valid snapshot, or None while Redis is away."""
    try:
        return await client.hget(snapshot, "generation")
    except RedisError:
        return None


async def _redis_bytes(store: RedisStore) -> int:
    return int((await store.info())["used_memory"])


async def register(agent: Channel, node_layout: Any) -> None:
    deadline = time.perf_counter() + START_SECONDS
    while True:
        try:
            await agent.call(
                "Register", pb.RegisterRequest(node=node_message(node(0, node_layout))), timeout_seconds=5.0
            )
            return
        except ManagerUnreachable:
            if time.perf_counter() > deadline:
                raise
            await asyncio.sleep(0.05)


async def _announce(agent: Channel, prompts: list[bytes], node_layout: Any) -> float:
    """Return seconds until the last batch is acknowledged, which is when it is in Redis."""
    batches = [
        batch_message(number + 1, announcements(prompt, BLOCKS_PER_PROMPT, node_layout))
        for number, prompt in enumerate(prompts)
    ]
    started = time.perf_counter()

    async def requests() -> Any:
        yield pb.ReportEventsRequest(hello=pb.Hello(node="n0", epoch=1))
        for batch in batches:
            yield pb.ReportEventsRequest(batch=batch)

    with agent.translated_errors():
        async for response in agent.stream("ReportEvents", requests()):
            if response.acknowledged == len(batches):
                break
    return time.perf_counter() - started


def _match(hashes: bytes) -> pb.MatchRequest:
    return pb.MatchRequest(model=MODEL, units=hashes, limit_tokens=len(hashes) - 1)


def _route(hashes: bytes) -> pb.RouteRequest:
    return pb.RouteRequest(model=MODEL, units=hashes, num_prompt_tokens=len(hashes), prompt_hash=bytes(16))


async def _unary(router: Channel, request: pb.MatchRequest) -> Any:
    return await router.call("Match", request, timeout_seconds=5.0)


async def _nothing(secret: bytes, requests: list[Any]) -> dict[str, float]:
    """Return the same calls to a process that does nothing."""
    address = free_address()
    process = _start_nothing(address)
    channel = Channel(address, name="router", secret=secret)
    try:
        deadline = time.perf_counter() + START_SECONDS
        while not await _answers(channel, requests[0]):
            assert time.perf_counter() < deadline, "nothing does not answer"
            await asyncio.sleep(0.05)
        return await _call(partial(_unary, channel), requests)
    finally:
        await channel.close()
        process.kill()
        process.wait()


def _start_nothing(address: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "benchmarks.index.nothing", address])


async def _answers(channel: Channel, request: pb.MatchRequest) -> bool:
    try:
        await _unary(channel, request)
    except ManagerUnreachable:
        return False
    return True


async def _call(ask: Callable[[Any], Awaitable[Any]], requests: list[Any]) -> dict[str, float]:
    seconds = []
    for number in range(CALLS + 100):
        started = time.perf_counter()
        await ask(requests[number % len(requests)])
        seconds.append(time.perf_counter() - started)
    return percentiles(seconds[100:])


async def _rate(ask: Callable[[Any], Awaitable[Any]], requests: list[Any]) -> int:
    """Answers a second with several questions in flight, from one client process."""

    async def caller(first: int) -> None:
        for number in range(first, CALLS, IN_FLIGHT):
            await ask(requests[number % len(requests)])

    started = time.perf_counter()
    await asyncio.gather(*map(caller, range(IN_FLIGHT)))
    return round(CALLS / (time.perf_counter() - started))


async def _until_matched(router: Channel, hashes: bytes) -> None:
    while True:
        try:
            response = await router.call("Match", _match(hashes), timeout_seconds=5.0)
            if response.nodes and response.nodes[0].attention_tokens == len(hashes) - 1:
                return
        except ManagerUnreachable:
            pass
        await asyncio.sleep(0.05)
