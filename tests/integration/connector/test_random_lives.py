"""Random requests, several at once in each engine, that end at random while agents are killed: nothing is left, nothing wrong
is loaded."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from prfaas.connector.settings import ADMISSIONS
from tests.integration.connector.fake_engine import NUM_BLOCKS, SHAPES, FakeEngine, Running
from tests.integration.connector.nodes import Nodes, running_nodes
from tests.integration.connector.random_requests import KINDS, PATIENT, PATIENT_AGENTS, REUSE, random_prompt
from tests.support.waiting import PATIENCE_SECONDS

GRANT_SECONDS = 5.0  # with which a transfer ends that waited for a killed agent, and that nobody claims any more
AT_ONCE = 3  # requests in each engine
MAX_CHUNK_TOKENS = 200
LOCAL_UNIT = 64  # tokens: a multiple of every shape's blocks
STAGES = ("asked", "offered", "loading", "computing", "computed")  # at which a client may leave


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with running_nodes(tmp_path, **PATIENT_AGENTS) as running:
        yield running


class _Left(Exception):
    """A request's client is gone."""


@dataclass(eq=False)
class Leg:
    """One request in one engine. `steps`: the tokens that it computes in each step, 0 where it waits."""

    engine: FakeEngine
    running: Running
    source: random.Random
    leaves_at: str | None
    steps: Iterator[int] = field(init=False)

    def reach(self, stage: str) -> None:
        if stage == self.leaves_at:
            raise _Left


@dataclass
class Lives:
    """Two engines, and the requests that they have at once."""

    nodes: Nodes
    prefiller: FakeEngine
    decoder: FakeEngine
    seed: int
    legs: list[Leg] = field(default_factory=list)
    left: Counter[str] = field(default_factory=Counter)  # clients, by stage
    most_at_once: Counter[FakeEngine] = field(default_factory=Counter)
    num_begun: int = 0
    num_random: int = 0
    grant_seconds: float = GRANT_SECONDS
    loads: dict[str, bool] = field(default_factory=dict)  # those that have ended, and whether they succeeded

    def begin(self, stages: Mapping[FakeEngine, str] | None = None) -> None:
        """One request more: a random one, or one of several chunks that is transferred and whose clients leave at these
        stages."""
        self.num_begun += 1
        self.num_random += stages is None
        source = random.Random(self.seed << 20 | self.num_begun)
        prompt = random_prompt(source, own=self.num_begun, least=20 if stages is None else MAX_CHUNK_TOKENS + 2)
        kind = source.choice(KINDS) if stages is None else "transferred"
        parameters = {"prfaas_grant": self.nodes.grant(prompt, expires_at=time.time() + self.grant_seconds)}
        begins: list[Callable[[], None]] = []
        if kind == "local":
            engine = source.choice([self.prefiller, self.decoder])
            begins.append(lambda: self._submit(engine, prompt, {}, source, stages))
        if kind in ("transferred", "never sent"):
            sent = parameters | {"do_remote_prefill": True}
            begins.append(lambda: self._submit(self.decoder, prompt, sent, source, stages))
        if kind == "refused":
            begins.append(lambda: self._refuse(parameters | {"do_remote_prefill": True}))
        if kind in ("transferred", "refused"):
            granted = parameters | {"do_remote_decode": True}
            begins.append(lambda: self._submit(self.prefiller, prompt[:-1], granted, source, stages))
        source.shuffle(begins)
        for begin in begins:
            begin()

    def _submit(
        self,
        engine: FakeEngine,
        prompt: list[int],
        parameters: dict[str, Any],
        source: random.Random,
        stages: Mapping[FakeEngine, str] | None,
    ) -> None:
        running = engine.submit(f"{engine._instance}-{self.num_begun}", prompt, parameters)
        leaves_at = source.choice([None] * len(STAGES) + [*STAGES]) if stages is None else stages.get(engine)
        leg = Leg(engine, running, random.Random(source.getrandbits(32)), leaves_at)
        leg.steps = self._live(leg)
        self.legs.append(leg)
        self.most_at_once[engine] = max(self.most_at_once[engine], len(self._of(engine)))

    def _refuse(self, parameters: dict[str, Any]) -> None:
        self.decoder.end(self.decoder.submit(f"refused-{self.num_begun}", [0], parameters, excluded="rejected"))

    def _of(self, engine: FakeEngine) -> list[Leg]:
        return [leg for leg in self.legs if leg.engine is engine]

    def _live(self, leg: Leg) -> Iterator[int]:
        engine, running, source = leg.engine, leg.running, leg.source
        local_tokens = LOCAL_UNIT * source.choice([0, 0, source.randrange(len(running.prompt)) // LOCAL_UNIT])
        try:
            leg.reach("asked")
            yield from self._admit(leg, local_tokens)
            while running.computed < len(running.prompt):
                yield self._chunk_tokens(source, len(running.prompt) - running.computed)
                leg.reach("computing")
                if source.random() < 0.05:
                    engine.preempt(running)
                    engine.look_up_again(running)
                    yield from self._admit(leg, 0)
            assert engine.wrong_blocks(running, running.computed) == []
            leg.reach("computed")
            engine.end(running, leaves=source.random() < 0.7)
        except _Left:
            self.left[str(leg.leaves_at)] += 1
            engine.end(running)

    @staticmethod
    def _chunk_tokens(source: random.Random, num_left: int) -> int:
        """Often all but the prompt's last token: what is copied a token too early shows."""
        return min(source.choice([source.randrange(1, MAX_CHUNK_TOKENS + 1), max(1, num_left - 1)]), num_left)

    def _admit(self, leg: Leg, local_tokens: int) -> Iterator[int]:
        """Wait as vLLM does until the request may run, with what its own cache holds of it and what is loaded."""
        engine, running = leg.engine, leg.running
        while (offered := engine.scheduler.num_external_tokens(running.request_id, local_tokens)) is None:
            yield 0
        leg.reach("offered")
        if local_tokens:
            engine.hold_prefix(running, local_tokens)
        engine.allocate(running, offered, local_tokens=local_tokens)
        if not offered:
            return
        leg.reach("loading")
        while running.request_id not in self.loads:
            yield 0
        if self.loads.pop(running.request_id):
            running.computed = local_tokens + offered
            assert engine.wrong_blocks(running, running.computed) == []
        else:
            engine.preempt(running)
            assert engine.scheduler.num_external_tokens(running.request_id, 0) == 0, "it is computed here"

    def step(self) -> None:
        """One step of each engine."""
        for engine in (self.prefiller, self.decoder):
            work = []
            for leg in self._of(engine):
                num_tokens = next(leg.steps, None)
                if num_tokens is None:
                    self.legs.remove(leg)
                elif num_tokens:
                    work.append((leg.running, num_tokens))
            finished, failed = engine.step(work)
            self.loads |= {request_id: request_id not in failed for request_id in finished}

    def run(self, num_requests: int, strike: Callable[[], None]) -> None:
        """Begin so many requests, as engines have room for them; `strike` comes before each step."""
        deadline = time.monotonic() + PATIENCE_SECONDS + 5.0 * num_requests
        while self.num_random < num_requests or self.legs:
            assert time.monotonic() < deadline, f"{self.legs} do not end"
            while self.num_random < num_requests and self._has_room:
                self.begin()
            strike()
            self.step()

    @property
    def _has_room(self) -> bool:
        return all(len(self._of(its)) + len(its._kept) < AT_ONCE for its in (self.prefiller, self.decoder))

    def counted(self, word: str) -> int:
        return sum(engine.outcomes().get(word, 0) for engine in (self.prefiller, self.decoder))

    def await_each_way(self) -> None:
        """Go on until KV has come from the other node once more, has been left, and has been taken up."""
        words = ("receive completed", "store completed", "reuse completed")
        before = {word: self.counted(word) for word in words}
        deadline = time.monotonic() + 2 * PATIENCE_SECONDS
        while self.legs or any(self.counted(word) == before[word] for word in words):
            assert time.monotonic() < deadline, f"{before} has not grown"
            if self._has_room and any(self.counted(word) == before[word] for word in words):
                self.begin({})
            self.step()

    def leave_at_every_stage(self) -> None:
        """Requests whose clients leave in the one engine or in the other. What is given up then is not given up for its
        grant's sake."""
        self.grant_seconds = 3600.0
        still = [{engine: stage} for engine in (self.prefiller, self.decoder) for stage in STAGES]
        deadline = time.monotonic() + 2 * PATIENCE_SECONDS
        while still or self.legs:
            assert time.monotonic() < deadline, f"{self.legs} do not end"
            if still and self._has_room:
                self.begin(still.pop())
            self.step()

    def assert_nothing_is_left(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        engines = (self.prefiller, self.decoder)
        while any(engine._kept or engine.scheduler.needs_steps for engine in engines):
            assert time.monotonic() < deadline, "the blocks of a finished request are kept for ever"
            self.step()
        for engine in engines:
            side, worker = engine.scheduler, engine.worker
            engine.step([])  # which tells of the ends of the last ones
            assert not side._has_work
            kept = (side._refused, side._outbound._given_up, worker._pending, worker._backlog)
            assert not any(kept), kept
            assert sorted(engine._free) == list(range(1, NUM_BLOCKS)), "each block is free, once"
        self.nodes.assert_nothing_is_left()


class Killer:
    """Kills an agent within a few steps after certain requests have begun."""

    def __init__(self, lives: Lives, *, num_requests: int, num_kills: int) -> None:
        self._lives = lives
        self._source = random.Random(lives.seed)
        self._at = sorted(self._source.sample(range(num_requests // 4, num_requests - 5), num_kills))
        self._steps_left: int | None = None
        self.num_killed = 0

    def strike(self) -> None:
        if self._steps_left is None and self._at and self._lives.num_random >= self._at[0]:
            self._at.pop(0)
            self._steps_left = self._source.randrange(8)
        elif self._steps_left:
            self._steps_left -= 1
        elif self._steps_left == 0:
            self._steps_left = None
            names: tuple[Literal["east", "west"], ...] = ("east", "west")
            self._lives.nodes.kill_agent(self._source.choice(names))
            self.num_killed += 1
            self._lives.await_each_way()


def _run(nodes: Nodes, shape: str, *, admission: str, num_requests: int, num_kills: int, seed: int) -> Lives:
    lives = Lives(nodes, *nodes.pair(SHAPES[shape], admission=admission, **REUSE, **PATIENT), seed)
    killer = Killer(lives, num_requests=num_requests, num_kills=num_kills)
    lives.run(num_requests, killer.strike)
    assert killer.num_killed == num_kills
    lives.leave_at_every_stage()
    lives.await_each_way()
    lives.assert_nothing_is_left()
    assert all(lives.most_at_once[engine] > 1 for engine in (lives.prefiller, lives.decoder))
    return lives


@pytest.mark.parametrize(("shape", "admission"), [("checkpointed", "wait"), ("windowed", "auto")])
def test_random_requests_and_three_kills_leave_nothing_behind(nodes: Nodes, shape: str, admission: str) -> None:
    _run(nodes, shape, admission=admission, num_requests=30, num_kills=3, seed=7)


def test_random_requests_and_resets_leave_nothing_behind(nodes: Nodes) -> None:
    """Blocks are forgotten while one transfer reads them and another fills them."""
    lives, source = Lives(nodes, *nodes.pair(SHAPES["checkpointed"], **REUSE, **PATIENT), 8), random.Random(8)

    def strike() -> None:
        if source.random() < 0.02:
            assert source.choice([lives.prefiller, lives.decoder]).scheduler.reset(nodes.model)

    lives.run(60, strike)
    lives.await_each_way()
    lives.assert_nothing_is_left()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", SHAPES)
def test_two_hundred_random_requests_and_three_kills_leave_nothing_behind(nodes: Nodes, shape: str, seed: int) -> None:
    admission = ADMISSIONS[seed % len(ADMISSIONS)]
    lives = _run(nodes, shape, admission=admission, num_requests=200, num_kills=3, seed=seed)
    assert set(lives.left) == set(STAGES), "clients have left at every stage"
