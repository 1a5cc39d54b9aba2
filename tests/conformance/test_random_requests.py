"""Random requests under vLLM's own scheduler, with preemptions, leaving clients, resets, and killed agents."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.support.agent_nodes import prompt_of, running_nodes
from tests.support.scheduled_engine import ScheduledEngine
from tests.support.scheduled_engines import ScheduledEngines
from tests.support.waiting import PATIENCE_SECONDS
from tools.tiny_models import make_model

pytestmark = pytest.mark.vllm
KINDS = ("transferred",) * 6 + ("local",) * 2 + ("refused", "never sent")
MAX_TOKENS = 500
SHARED_PROMPTS = range(2, 7)
GRANT_SECONDS = 5.0  # Ends transfers that wait for a killed agent.
MAX_REQUESTS = 4  # At once in each engine.
PREEMPTION_STEPS = 50  # Between two preemptions of all running requests of an engine.
LEAVING_STEPS = 12  # Clients leave at most so many steps after their request.
LEAVING_TOKENS = 300  # Such a prompt takes five chunks.
# Only the situation under test ends a wait, so a request that hears of no end is noticed.
PATIENT = {"silence_seconds": 3600.0}
REUSE: dict[str, Any] = {"reuse": True, "reuse_min_tokens": 16}
Victim = Literal["east", "west"]
Leaving = Mapping[ScheduledEngine, int] | None


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[ScheduledEngines]:
    with running_nodes(tmp_path, open_timeout_seconds="1s", silence_seconds="1s") as nodes:
        made = ScheduledEngines(nodes, make_model("llama", tmp_path / "llama"), "random")
        yield made
        made.close()


def _random_prompt(source: random.Random, *, own: int, least: int) -> list[int]:
    """Return a prompt of its own, a part of a shared prompt, or a branch of one. No other request has the number `own`."""
    length, shared = source.randrange(least, MAX_TOKENS), source.choice(SHARED_PROMPTS)
    num_shared = source.choice([0, 0, length, source.randrange(1, length)])
    if not num_shared:
        return prompt_of(1000 + own, length)
    branch = prompt_of(1000 + own, length - num_shared) if num_shared < length else []
    return prompt_of(shared, num_shared) + branch


@dataclass
class Traffic:
    """Random requests in two engines. `leaving` has the steps until the client of a request leaves."""

    engines: ScheduledEngines
    prefiller: ScheduledEngine
    decoder: ScheduledEngine
    source: random.Random
    grant_seconds: float = GRANT_SECONDS
    running: dict[str, ScheduledEngine] = field(default_factory=dict)
    leaving: dict[str, int] = field(default_factory=dict)
    num_steps: int = 0
    num_begun: int = 0
    num_left: int = 0
    num_preempted: int = 0

    @property
    def both(self) -> tuple[ScheduledEngine, ScheduledEngine]:
        return self.prefiller, self.decoder

    def begin(self, leaving: Leaving = None) -> None:
        """Begin a random request, or a long transferred one whose clients leave after so many steps."""
        self.num_begun += 1
        prompt = _random_prompt(self.source, own=self.num_begun, least=20 if leaving is None else LEAVING_TOKENS)
        kind = self.source.choice(KINDS) if leaving is None else "transferred"
        grant = self.engines.grant(prompt, expires_at=time.time() + self.grant_seconds)
        received = {"do_remote_prefill": True, "prfaas_grant": grant}
        sent = {"do_remote_decode": True, "prfaas_grant": grant}
        begins: list[Callable[[], None]] = []
        if kind == "local":
            begins.append(partial(self._submit, self.source.choice(self.both), prompt, {}, leaving))
        if kind in ("transferred", "never sent"):
            begins.append(partial(self._submit, self.decoder, prompt, received, leaving))
        if kind == "refused":
            begins.append(partial(self.decoder.refuse, f"refused-{self.num_begun}", received))
        if kind in ("transferred", "refused"):
            begins.append(partial(self._submit, self.prefiller, prompt[:-1], sent, leaving))
        self.source.shuffle(begins)
        for begin in begins:
            begin()

    def _submit(self, engine: ScheduledEngine, prompt: list[int], parameters: dict[str, Any], leaving: Leaving) -> None:
        request_id = f"{'p' if engine is self.prefiller else 'd'}{self.num_begun}"
        is_sent = "do_remote_decode" in parameters
        answer_tokens = 1 if is_sent else self.source.randrange(1, 40)
        ends_by_itself = not is_sent and self.source.random() < 0.5
        engine.submit(request_id, prompt, parameters, answer_tokens=answer_tokens, ends_by_itself=ends_by_itself)
        self.running[request_id] = engine
        if leaving is not None and engine in leaving:
            self.leaving[request_id] = leaving[engine]
        elif leaving is None and self.source.random() < 0.3:
            self.leaving[request_id] = self.source.randrange(LEAVING_STEPS)

    def step(self) -> None:
        """Run a step of each engine and of the clients."""
        self.num_steps += 1
        if self.num_steps % PREEMPTION_STEPS == 0:
            self.source.choice(self.both).preempt_all()
        for engine in self.both:
            engine.step()
        for request_id, engine in list(self.running.items()):
            if request_id in engine.told.finished:
                self._forget(request_id)
            elif self.leaving.get(request_id) == 0:
                self.num_left += 1
                engine.abort(request_id)
                self._forget(request_id)
            elif request_id in self.leaving:
                self.leaving[request_id] -= 1

    def _forget(self, request_id: str) -> None:
        engine = self.running.pop(request_id)
        self.leaving.pop(request_id, None)
        self.num_preempted += engine.num_preemptions(request_id)

    @property
    def _has_room(self) -> bool:
        return all(list(self.running.values()).count(engine) < MAX_REQUESTS for engine in self.both)

    def run(self, begins: list[Callable[[], None]], *, to_the_end: bool = True) -> None:
        """Begin these requests while engines have room."""
        deadline = time.monotonic() + 2 * PATIENCE_SECONDS + 2.0 * len(begins)
        while begins or (to_the_end and self.running):
            assert time.monotonic() < deadline, f"{sorted(self.running)} do not end"
            while begins and self._has_room:
                begins.pop()()
            self.step()

    def num_outcomes(self, word: str) -> int:
        return sum(engine.told.outcomes[word] for engine in self.both)

    def await_transfer_store_and_preemption(self) -> None:
        """Go on until one more request was received, one was stored, and one was preempted."""
        words = ("receive completed", "store completed")
        before = {word: self.num_outcomes(word) for word in words}
        deadline = time.monotonic() + 2 * PATIENCE_SECONDS
        while not self.num_preempted or any(self.num_outcomes(word) == before[word] for word in words):
            assert time.monotonic() < deadline, f"{before} has not grown, or {self.num_preempted} were preempted"
            if self._has_room:
                self.begin({})
            self.step()

    def leave_after_each_step(self) -> None:
        """Have clients leave either engine. Their transfers do not end by the grant's deadline."""
        self.grant_seconds = 3600.0
        self.run([partial(self.begin, {engine: steps}) for engine in self.both for steps in range(LEAVING_STEPS)])

    def reset_now_and_then(self) -> None:
        """Have agents forget the model while transfers read and fill blocks."""
        for _ in range(3):
            self.run([self.begin] * 4, to_the_end=False)
            assert self.source.choice(self.both).scheduler.connector.reset_cache()
        self.run([])

    def assert_nothing_is_left(self) -> None:
        self.engines.assert_nothing_is_left()
        for engine in self.both:
            assert engine.told.wrong_blocks == []
            assert set(engine.told.finished.values()) <= {"length", "stop"}
        assert self.num_left > 3


def _run(
    engines: ScheduledEngines, shape: str, *, num_requests: int, victims: list[Victim], seed: int, **settings: Any
) -> None:
    drafting = engines.drafting if settings.pop("has_draft_model", False) else {}
    options: dict[str, Any] = {**PATIENT, **REUSE, **settings, **drafting}
    traffic = Traffic(
        engines, engines.prefiller(shape, **options), engines.decoder(shape, **options), random.Random(seed)
    )
    for victim in victims:
        traffic.run([traffic.begin] * (num_requests // len(victims)), to_the_end=False)
        engines.nodes.kill_agent(victim)
        traffic.await_transfer_store_and_preemption()
    traffic.run([])
    traffic.reset_now_and_then()
    traffic.leave_after_each_step()
    traffic.await_transfer_store_and_preemption()
    traffic.run([])
    traffic.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ("checkpointed", {"caches_prefixes": True, "asynchronous": True}),
        ("checkpointed", {"caches_prefixes": True, "has_draft_model": True}),
        ("recurrent", {"num_drafts": 3}),
        ("windowed", {"has_draft_model": True}),
        ("short windows", {}),
        ("chunked", {"caches_prefixes": True, "reuse": True, "reuse_min_tokens": 16}),
    ],
)
def test_random_requests_with_two_kills_leave_nothing(
    engines: ScheduledEngines, shape: str, settings: dict[str, Any]
) -> None:
    _run(engines, shape, num_requests=16, victims=["west", "east"], seed=5, **settings)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("shape", "caches_prefixes"),
    [
        ("dense", True),
        ("windowed", False),
        ("short windows", False),
        ("recurrent", False),
        ("checkpointed", True),
        ("checkpointed and windowed", True),
    ],
)
def test_two_hundred_random_requests_with_three_kills_leave_nothing(
    engines: ScheduledEngines, shape: str, caches_prefixes: bool, asynchronous: bool
) -> None:
    settings = {"caches_prefixes": caches_prefixes, "asynchronous": asynchronous}
    _run(engines, shape, num_requests=200, victims=["west", "east", "west"], seed=6, **settings)
