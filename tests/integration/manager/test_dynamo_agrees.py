"""Indexer pages and Dynamo's standalone indexer give the same answers for attention-only events of vLLM.

Needs Dynamo in the environment of `make bench AREA=index`. Both are compared with a set of held paths.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from benchmarks.index import peers
from prfaas.manager.daemon import Manager
from tests.support.deployment import MODEL, Deployment
from tests.support.waiting import PATIENCE_SECONDS, POLL_SECONDS
from tools.free_ports import free_address

kv_events = pytest.importorskip("vllm.distributed.kv_events")

BLOCK = 16
ENGINES = (1, 2, 3)
NUM_PROMPTS, MAX_BLOCKS = 30, 20
PHASES, CHANGES = 12, 40
PYTHON = peers.dynamo_python()

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(PYTHON is None, reason=f"{peers.DYNAMO} is not installed: make bench AREA=index installs it"),
]
Path = tuple[int, ...]  # Tokens of whole blocks.


class Engine:
    """One engine's cache, as the set of paths that it holds, and its publisher."""

    def __init__(self, number: int, chance: random.Random) -> None:
        self._chance = chance
        self.held: set[Path] = set()
        endpoints = [f"tcp://{free_address()}" for _ in range(2)]
        self.source = {"instance_id": number, "endpoint": endpoints[0], "replay_endpoint": endpoints[1]}
        listens = [endpoint.replace("127.0.0.1", "*") for endpoint in endpoints]  # vLLM connects where there is no star
        self.publisher = kv_events.ZmqEventPublisher(0, *listens)

    def store(self, prompt: Path) -> None:
        """Hold a part of the prompt; told as vLLM does, from the first missing block on."""
        wanted = [
            prompt[:end] for end in range(BLOCK, self._chance.randint(1, len(prompt) // BLOCK) * BLOCK + 1, BLOCK)
        ]
        fresh = [path for path in wanted if path not in self.held]
        if fresh:
            parent, tokens = fresh[0][:-BLOCK], fresh[-1][len(fresh[0]) - BLOCK :]
            hashes = [_hash(path) for path in fresh]
            event = kv_events.BlockStored(
                hashes, _hash(parent) if parent else None, list(tokens), BLOCK, None, "GPU", None
            )
            self._publish(event)
            self.held.update(fresh)

    def evict(self) -> None:
        """Let go of a block that nothing held descends from."""
        parents = {path[:-BLOCK] for path in self.held}
        leaves = sorted(self.held - parents)
        if leaves:
            gone = self._chance.choice(leaves)
            self._publish(kv_events.BlockRemoved([_hash(gone)], "GPU"))
            self.held.discard(gone)

    def clear(self) -> None:
        self._publish(kv_events.AllBlocksCleared())
        self.held.clear()

    def _publish(self, *events: Any) -> None:
        self.publisher.publish(kv_events.KVEventBatch(ts=0.0, events=list(events)))

    def step(self) -> None:
        """A batch without news: who joined late sees by its number that something is missing."""
        self._publish()

    def matched(self, prompt: Path) -> int:
        """Tokens that it holds of the prompt from the start on."""
        ends = range(BLOCK, len(prompt) + 1, BLOCK)
        return len(list(itertools.takewhile(lambda end: prompt[:end] in self.held, ends))) * BLOCK


def _hash(path: Path) -> int:
    return random.Random(str(path)).getrandbits(64)


def _prompts(chance: random.Random) -> list[Path]:
    """Prompts that begin with a part of an earlier one."""
    prompts: list[Path] = [()]
    for _ in range(NUM_PROMPTS):
        stem = chance.choice(prompts)
        kept = stem[: chance.randint(0, len(stem) // BLOCK) * BLOCK]
        fresh = chance.randint(1, MAX_BLOCKS) * BLOCK
        prompts.append(kept + tuple(chance.randrange(50_000) for _ in range(fresh)))
    return prompts[1:]


@pytest.fixture
def dynamo() -> Iterator[str]:
    """The address of a standalone indexer."""
    address = free_address()
    command = [str(PYTHON), "-m", "dynamo.indexer", "--threads", "1", "--port", address.rpartition(":")[2]]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield address
    process.kill()
    process.wait()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def _register(http: aiohttp.ClientSession, address: str, engine: Engine) -> None:
    """Waits until the indexer listens."""
    body = {**engine.source, "model_name": MODEL, "block_size": BLOCK}
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                async with http.post(f"http://{address}/register", json=body) as response:
                    assert response.status in (200, 201), await response.text()
                    return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(POLL_SECONDS)


async def _answer(http: aiohttp.ClientSession, address: str, prompt: Path) -> dict[str, int]:
    """Tokens on the device, by engine."""
    async with http.post(f"http://{address}/query", json={"model_name": MODEL, "token_ids": prompt}) as response:
        document = await response.json(content_type=None)
        return {name: entry["gpu"] for name, entry in document["instances"].items() if entry["gpu"]}


async def _until_answered(http: aiohttp.ClientSession, address: str, engines: list[Engine], prompt: Path) -> None:
    matched = {str(engine.source["instance_id"]): engine.matched(prompt) for engine in engines}
    expected = {name: tokens for name, tokens in matched.items() if tokens}
    deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
    while (found := await _answer(http, address, prompt)) != expected:
        assert asyncio.get_running_loop().time() < deadline, f"{address}: {found}, not {expected}"
        for engine in engines:
            engine.step()
        await asyncio.sleep(POLL_SECONDS)


async def test_answers_equal_those_of_dynamo(deployment: Deployment, dynamo: str, http: aiohttp.ClientSession) -> None:
    manager: Manager = await deployment.start_manager(engine_indexer=True)
    chance = random.Random(20)
    prompts, engines = _prompts(chance), [Engine(number, chance) for number in ENGINES]
    for engine in engines:
        for address in (dynamo, manager.http_address):
            await _register(http, address, engine)
    for _ in range(PHASES):
        for _ in range(CHANGES):
            engine = chance.choice(engines)
            change = chance.random()
            if change < 0.01:
                engine.clear()
            elif change < 0.6:
                engine.store(chance.choice(prompts))
            else:
                engine.evict()
        for prompt in prompts:
            for address in (manager.http_address, dynamo):
                await _until_answered(http, address, engines, prompt)
    for engine in engines:
        await asyncio.to_thread(engine.publisher.shutdown)
