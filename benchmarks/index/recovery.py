"""A Redis under two managers is killed, and a Sentinel's master: until when writes are back, what is lost, who still answers.

One node stores a prompt twenty times a second, which the writing manager records and the following one reads; that one
knows nothing but what Redis has told it. A third manager, started afterwards, has the record alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prfaas.errors import IndexRefusal, ManagerUnreachable
from prfaas.index.query import Query
from prfaas.index.segments import digest_of_node
from prfaas.manager.daemon import Manager
from prfaas.rpc.tasks import cancel_tasks
from prfaas.types import AgentName
from tests.integration.manager.replicated_redis import ReplicatedRedis
from tests.support.deployment import MODEL, Deployment, chain_of, hybrid_layout, kill, match_request, stored
from tests.support.waiting import until

LAYOUT = hybrid_layout()
NODE = "n1"
PROMPT_TOKENS = 160
PUBLISH_SECONDS = 0.05
BEFORE_SECONDS = 6.0
COMMITTED_SECONDS = 2.0  # Time before the kill.
AS_BY_DEFAULT = {"digest_seconds": 10.0, "silence_seconds": 2.0, "expiry_seconds": 30.0, "lease_seconds": 5.0}
LIMITS: dict[str, dict[str, float]] = {
    "redis_killed": {"writes_back_seconds": 5.0, "digests_equal_seconds": 30.0, "committed_prompts_lost": 0},
    "sentinel_failover": {"committed_prompts_lost": 0},
}


def measure() -> dict[str, Any]:
    """Both, with the limits and whether they hold."""
    found = asyncio.run(_measure())
    return found | {"limits": LIMITS, "misses": misses(found)}


def misses(found: dict[str, Any]) -> list[str]:
    """Return which limits do not hold."""
    return [
        f"{name}: {figure} {found[name][figure]}, at most {limit}"
        for name, limits in LIMITS.items()
        for figure, limit in limits.items()
        if found[name][figure] > limit
    ]


async def _measure() -> dict[str, Any]:
    return {"redis_killed": await _redis_killed(), "sentinel_failover": await _sentinel_failover()}


async def _redis_killed() -> dict[str, Any]:
    with TemporaryDirectory(prefix="prfaas-bench-") as path:
        async with Deployment(Path(path)) as deployment:
            redis = await deployment.start_redis()

            async def fail() -> None:
                kill(redis.pid)

            return await _through(deployment, redis.url, fail)


async def _sentinel_failover() -> dict[str, Any]:
    with TemporaryDirectory(prefix="prfaas-bench-") as path:
        replicated = ReplicatedRedis(Path(path))
        try:
            await asyncio.to_thread(replicated.watch)

            async def fail() -> None:
                replicated.master.kill()
                await asyncio.to_thread(replicated.give_up_the_master)

            async with Deployment(Path(path)) as deployment:
                return await _through(deployment, replicated.url, fail)
        finally:
            await asyncio.to_thread(replicated.close)


async def _through(deployment: Deployment, redis_url: str, fail: Callable[[], Awaitable[None]]) -> dict[str, Any]:
    settings: dict[str, object] = {"redis_url": redis_url, **AS_BY_DEFAULT}
    writer, follower = [await deployment.start_manager(**settings) for _ in range(2)]
    load = Load(deployment, writer, follower)
    await load.start()
    await asyncio.sleep(BEFORE_SECONDS)
    failed_at = time.monotonic()
    await fail()
    first_after = len(load.published_at)
    await until(lambda: len(load.known_at) > first_after, what="a prompt that was stored after the failure")
    await load.stop_storing()
    late = await deployment.start_manager(**settings)
    await late.replication.has_loaded.wait()
    committed = [number for number, at in enumerate(load.known_at) if at <= failed_at - COMMITTED_SECONDS]
    lost = [number for number in committed if not _knows(late, number)]
    await until(lambda: all(map(load.is_whole, (writer, follower, late))), what="equal digests")
    equal_seconds = time.monotonic() - failed_at
    await load.close()
    return {
        "writes_back_seconds": round(load.known_at[first_after] - failed_at, 2),
        "digests_equal_seconds": round(equal_seconds, 2),
        "committed_prompts": len(committed),
        "committed_prompts_lost": len(lost),
        "lookups": load.num_answers,
        "lookups_failed": load.num_failed,
        "longest_lookup_milliseconds": round(load.longest_seconds * 1e3, 1),
        "was_marked_stale": load.was_stale,
    }


class Load:
    """A node that stores, and a router that asks the manager which writes; prompts are numbered."""

    def __init__(self, deployment: Deployment, writer: Manager, follower: Manager) -> None:
        self._writer, self._follower = writer, follower
        self._client = deployment.client(writer)
        self._reporter = deployment.reporter(NODE, writer)
        deployment.run(self._reporter)
        self.published_at: list[float] = []
        self.known_at: list[float] = []  # Times at the following manager.
        self.num_answers = self.num_failed = 0
        self.longest_seconds = 0.0
        self.was_stale = False
        self._storing: asyncio.Task[None] | None = None
        self._others: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when the first prompt is known to both managers."""
        self._storing = asyncio.create_task(self._store())
        self._others.append(asyncio.create_task(self._follow()))
        await until(lambda: self.known_at, what="the first prompt")
        self._others.append(asyncio.create_task(self._ask()))

    async def stop_storing(self) -> None:
        """Publish no more; the rest continues."""
        assert self._storing is not None, "it was started"
        await cancel_tasks((self._storing,))

    async def close(self) -> None:
        await cancel_tasks(self._others)

    def is_whole(self, manager: Manager) -> bool:
        """Return whether a manager knows exactly what the node holds."""
        try:
            digests = manager.world.index.digests(AgentName(NODE))
        except IndexRefusal:
            return False
        return str(digest_of_node(digests)) == self._reporter.status.digest

    async def _store(self) -> None:
        while True:
            chain = chain_of(PROMPT_TOKENS, seed=len(self.published_at))
            self.published_at.append(time.monotonic())
            self._reporter.publish(stored(LAYOUT, chain, PROMPT_TOKENS))
            await asyncio.sleep(PUBLISH_SECONDS)

    async def _follow(self) -> None:
        while True:
            if len(self.known_at) < len(self.published_at) and _knows(self._follower, len(self.known_at)):
                self.known_at.append(time.monotonic())
            else:
                await asyncio.sleep(0.005)
            self.was_stale |= self._writer.replication.is_stale

    async def _ask(self) -> None:
        request = match_request(chain_of(PROMPT_TOKENS + 1, seed=0))
        while True:
            started = time.monotonic()
            try:
                answer = await self._client.match(request)
                self.num_answers += 1
                self.num_failed += not answer.nodes
            except (ManagerUnreachable, IndexRefusal):
                self.num_failed += 1
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - started)
            await asyncio.sleep(0.02)


def _knows(manager: Manager, number: int) -> bool:
    """Return whether a manager would answer for all of a prompt."""
    units = b"".join(chain_of(PROMPT_TOKENS, seed=number).units)
    try:
        answer = manager.world.index.match(Query(MODEL, units, PROMPT_TOKENS))
    except IndexRefusal:
        return False
    return any(match.usable_tokens == PROMPT_TOKENS for match in answer.nodes)
