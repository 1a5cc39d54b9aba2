"""Manager processes and Redis are killed at random, and answers become correct again."""

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prfaas.pool_events import BlockRemoved, BlockStored
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.reporter import Reporter
from tests.support.deployment import SECRET, Deployment, chain_of, hybrid_layout, kill, stored, until_usable
from tools.free_ports import free_address

LAYOUT = hybrid_layout()
ROUNDS = 6


class Processes:
    """Two managers as processes of their own, on one Redis."""

    def __init__(self, deployment: Deployment, redis_url: str) -> None:
        self._deployment = deployment
        self._redis_url = redis_url
        self.addresses = (free_address(), free_address())
        self._running = [self._start(number) for number in range(2)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        directory: Path = self._deployment.directory
        options = {
            "listen": self.addresses[number],
            "http-listen": "127.0.0.1:0",
            "secret-file": str(self._deployment.secret_file),
            "redis-url": self._redis_url,
            "silence-seconds": "1.2s",
            "expiry-seconds": "2s",
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        log = (directory / f"manager-{number}.log").open("ab")
        with log:
            return subprocess.Popen([sys.executable, "-m", "prfaas.cli.manager", *flags], stderr=log, stdout=log)

    def kill_and_restart(self, number: int) -> None:
        self._running[number].kill()
        self._running[number].wait()
        self._running[number] = self._start(number)

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


@pytest.fixture
async def processes(deployment: Deployment) -> AsyncIterator[Processes]:
    redis = await deployment.start_redis()
    started = Processes(deployment, redis.url)
    yield started
    await asyncio.to_thread(started.close)


class Node:
    """A node whose pool keeps changing; `expected` is what it holds of one prompt."""

    def __init__(self, deployment: Deployment, name: str, addresses: tuple[str, ...]) -> None:
        self._deployment, self._name, self._addresses = deployment, name, addresses
        self.expected = 0
        self.reporter, self._task = self._start()

    def _start(self) -> tuple[Reporter, asyncio.Task[None]]:
        reporter = self._deployment.reporter(self._name, addresses=self._addresses)
        return reporter, self._deployment.run(reporter)

    async def restart(self) -> None:
        await self._deployment.end(self._task)
        self.reporter, self._task = self._start()
        self.expected = 0

    def store_up_to(self, length: int) -> None:
        chain = chain_of(640)
        if length < self.expected:
            gone = range(length + 16, self.expected + 1, 16)
            blocks = [BlockRemoved(LAYOUT.fingerprint, 0, chain.at(end)) for end in gone]
            self.reporter.publish([*blocks, BlockRemoved(LAYOUT.fingerprint, 1, chain.at(self.expected))])
        self.reporter.publish([event for event in stored(LAYOUT, chain, length) if isinstance(event, BlockStored)])
        self.expected = length


@pytest.mark.timeout(240)
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(7, 28))
async def test_answers_are_correct_after_the_last_kill(deployment: Deployment, processes: Processes, seed: int) -> None:
    chance = random.Random(seed)
    nodes = [Node(deployment, name, processes.addresses) for name in ("n1", "n2")]
    for _ in range(ROUNDS):
        for node in nodes:
            node.store_up_to(16 * chance.randint(1, 40))
        await asyncio.sleep(chance.uniform(0.2, 1.0))  # The test is about the state that a kill interrupts.
        victim = chance.choice(["manager 0", "manager 1", "redis", "node"])
        if victim == "redis":
            assert deployment.redis is not None
            kill(deployment.redis.pid)
        elif victim == "node":
            await chance.choice(nodes).restart()
        else:
            await asyncio.to_thread(processes.kill_and_restart, int(victim[-1]))
    expected = {f"n{number + 1}": node.expected for number, node in enumerate(nodes) if node.expected}
    for address in processes.addresses:
        client = ManagerClient([address], name="router", secret=SECRET)
        await until_usable(client, chain_of(641), expected)
        await client.close()
