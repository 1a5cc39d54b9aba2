"""Many requests with random lengths and ends while agents are killed: nothing is left behind, and nothing wrong is loaded."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests.integration.connector.fake_engine import NUM_BLOCKS, SHAPES, FakeEngine, Running
from tests.integration.connector.nodes import Nodes, prompt_of, receiving, running_nodes, sending
from tests.waiting import wait_until

GRANT_SECONDS = (
    5.0  # a transfer that waited for a killed agent arrives when nobody claims it any more, and ends with this
)
STAGES = ("asked", "prefilling", "sent", "ready")  # at which a client may leave, or an agent die


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with running_nodes(tmp_path, open_timeout_seconds="1s", reconnect_seconds="1s") as running:
        yield running


@dataclass
class Lives:
    """Requests one after the other, each through both engines."""

    nodes: Nodes
    prefiller: FakeEngine
    decoder: FakeEngine
    source: random.Random
    num_loaded: int = 0

    def one(self, number: int, strike: Callable[[str], None] = lambda stage: None) -> None:
        """A request of random length that is aborted at a random stage, or not at all; `strike` may kill an agent."""
        prompt = prompt_of(number, self.source.randrange(20, 500))
        grant = self.nodes.grant(prompt, expires_at=time.time() + GRANT_SECONDS)
        leaves = self.source.choice([None, None, None, *STAGES])
        parked, prefilling = receiving(self.decoder, prompt, grant), sending(self.prefiller, prompt, grant)
        strike("asked")
        if leaves == "asked":
            self.decoder.finish(parked)
        self._prefill(prefilling, until=leaves, strike=strike)
        if leaves != "asked":
            self._decode(parked, until=leaves, strike=strike)

    def _prefill(self, running: Running, *, until: str | None, strike: Callable[[str], None]) -> None:
        self.prefiller.await_answer(running)
        while running.computed < len(running.prompt):
            remaining = len(running.prompt) - running.computed
            self.prefiller.step([(running, min(self.source.randrange(1, 200), remaining))])
            strike("prefilling")
            if until == "prefilling":
                break
        self.prefiller.finish(running)
        strike("sent")

    def _decode(self, running: Running, *, until: str | None, strike: Callable[[str], None]) -> None:
        num_tokens = 0 if until == "sent" else self.decoder.await_answer(running)
        strike("ready")
        if num_tokens and until != "ready" and self.decoder.load(running, num_tokens):
            assert self.decoder.wrong_blocks(running, num_tokens) == []
            self.num_loaded += 1
        self.decoder.finish(running)

    def assert_nothing_is_left(self) -> None:
        for engine in (self.prefiller, self.decoder):
            side = engine.scheduler
            assert engine.num_free_blocks == NUM_BLOCKS - 1
            assert [len(its) for its in (side._outgoing, side._incoming, side._lookups, side._leftovers)] == [0] * 4
        self.nodes.assert_nothing_is_left()


def _run(nodes: Nodes, shape: str, *, num_requests: int, num_kills: int, seed: int) -> None:
    lives = Lives(nodes, *nodes.pair(SHAPES[shape]), random.Random(seed))
    doomed = set(lives.source.sample(range(num_requests // 4, num_requests - 5), num_kills))
    for number in range(num_requests):
        if number in doomed:
            lives.one(number + 2, _killer(nodes, lives.source))
            _await_transfers(lives)
        else:
            lives.one(number + 2)
    lives.assert_nothing_is_left()


def _await_transfers(lives: Lives) -> None:
    """Go on with requests until one is loaded again."""
    before = lives.num_loaded
    wait_until(lambda: _loads_again(lives, before), seconds=120, what="transfers after a kill")


def _killer(nodes: Nodes, source: random.Random) -> Callable[[str], None]:
    """Kills one of the agents when a request comes to a certain stage; a request that never does is spared."""
    names: tuple[Literal["east", "west"], ...] = ("east", "west")
    name, when = source.choice(names), source.choice(STAGES)
    done = False

    def strike(stage: str) -> None:
        nonlocal done
        if stage == when and not done:
            done = True
            nodes.kill_agent(name)

    return strike


def _loads_again(lives: Lives, before: int) -> bool:
    lives.one(lives.source.randrange(1000, 1 << 20))
    return lives.num_loaded > before


def test_random_requests_and_three_kills_leave_nothing_behind(nodes: Nodes) -> None:
    _run(nodes, "checkpointed", num_requests=30, num_kills=3, seed=7)


def test_random_requests_and_resets_leave_nothing_behind(nodes: Nodes) -> None:
    """A few prompts again and again, so that blocks are forgotten while one transfer reads them and another fills them."""
    lives = Lives(nodes, *nodes.pair(SHAPES["checkpointed"]), random.Random(8))

    def strike(stage: str) -> None:
        if lives.source.random() < 0.05:
            assert lives.source.choice([lives.prefiller, lives.decoder]).scheduler.reset(nodes.model), stage

    for number in range(60):
        lives.one(2 + number % 5, strike)
    assert lives.num_loaded > 10
    lives.assert_nothing_is_left()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", SHAPES)
def test_two_hundred_random_requests_and_three_kills_leave_nothing_behind(nodes: Nodes, shape: str, seed: int) -> None:
    _run(nodes, shape, num_requests=200, num_kills=3, seed=seed)
