"""Random requests under vLLM's own scheduler, which takes blocks away from them; clients leave, agents are killed.

The like with an engine of ours, which says at which stage a client leaves, is in `tests/integration/connector`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.conformance.scheduled_engine import ScheduledEngine
from tests.conformance.site import Site
from tests.integration.connector.nodes import running_nodes
from tests.integration.connector.random_requests import KINDS, PATIENT, PATIENT_AGENTS, REUSE, random_prompt
from tests.support.waiting import PATIENCE_SECONDS
from tools.tiny_models import make_model

pytestmark = pytest.mark.vllm
GRANT_SECONDS = 5.0  # with which a transfer ends that waited for a killed agent
AT_ONCE = 4  # requests in each engine
PREEMPTION_STEPS = 50  # between two times that an engine takes the blocks of all its running requests
LEAVING_STEPS = 12  # after at most so many, from its arrival, a client leaves
LEAVING_TOKENS = 300  # at least, of a prompt whose client leaves: a prefill of five chunks
Victim = Literal["east", "west"]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with running_nodes(tmp_path, **PATIENT_AGENTS) as nodes:
        made = Site(nodes, make_model("llama", tmp_path / "llama"), "lives")
        yield made
        for engine in made.engines:
            engine.close()


@dataclass
class Lives:
    """Two engines, and the requests that they have at once."""

    site: Site
    prefiller: ScheduledEngine
    decoder: ScheduledEngine
    source: random.Random
    grant_seconds: float = GRANT_SECONDS
    running: dict[str, ScheduledEngine] = field(default_factory=dict)
    leaving: dict[str, int] = field(default_factory=dict)  # those whose clients leave, after so many more steps
    num_steps: int = 0
    num_begun: int = 0
    num_left: int = 0
    num_preempted: int = 0

    def begin(self, leaving: Mapping[ScheduledEngine, int] | None = None) -> None:
        """One request more: a random one, or a long one that is transferred, whose clients leave after so many steps."""
        self.num_begun += 1
        prompt = random_prompt(self.source, own=self.num_begun, least=20 if leaving is None else LEAVING_TOKENS)
        kind = self.source.choice(KINDS) if leaving is None else "transferred"
        grant = self.site.grant(prompt, expires_at=time.time() + self.grant_seconds)
        taken = {"do_remote_prefill": True, "prfaas_grant": grant}
        sent = {"do_remote_decode": True, "prfaas_grant": grant}
        begins: list[Callable[[], None]] = []
        if kind == "local":
            engine = self.source.choice([self.prefiller, self.decoder])
            begins.append(lambda: self._submit(engine, prompt, {}, leaving))
        if kind in ("transferred", "never sent"):
            begins.append(lambda: self._submit(self.decoder, prompt, taken, leaving))
        if kind == "refused":
            begins.append(lambda: self.decoder.refuse(f"refused-{self.num_begun}", taken))
        if kind in ("transferred", "refused"):
            begins.append(lambda: self._submit(self.prefiller, prompt[:-1], sent, leaving))
        self.source.shuffle(begins)
        for begin in begins:
            begin()

    def _submit(
        self,
        engine: ScheduledEngine,
        prompt: list[int],
        parameters: dict[str, Any],
        leaving: Mapping[ScheduledEngine, int] | None,
    ) -> None:
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

    @property
    def engines(self) -> tuple[ScheduledEngine, ScheduledEngine]:
        return self.prefiller, self.decoder

    def step(self) -> None:
        """One step of each engine, and of their clients."""
        self.num_steps += 1
        if self.num_steps % PREEMPTION_STEPS == 0:
            self.source.choice(self.engines).preempt_all()
        for engine in self.engines:
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
        return all(list(self.running.values()).count(engine) < AT_ONCE for engine in self.engines)

    def run(self, begins: list[Callable[[], None]], *, to_the_end: bool = True) -> None:
        """Begin these requests, as engines have room for them."""
        deadline = time.monotonic() + 2 * PATIENCE_SECONDS + 2.0 * len(begins)
        while begins or (to_the_end and self.running):
            assert time.monotonic() < deadline, f"{sorted(self.running)} do not end"
            while begins and self._has_room:
                begins.pop()()
            self.step()

    def counted(self, word: str) -> int:
        return sum(engine.told.outcomes[word] for engine in self.engines)

    def await_each_way(self) -> None:
        """Go on until KV has come from the other node once more, and has been left, and a request has lost its blocks."""
        words = ("receive completed", "store completed")
        before = {word: self.counted(word) for word in words}
        deadline = time.monotonic() + 2 * PATIENCE_SECONDS
        while not self.num_preempted or any(self.counted(word) == before[word] for word in words):
            assert time.monotonic() < deadline, f"{before} has not grown, or {self.num_preempted} were preempted"
            if self._has_room:
                self.begin({})
            self.step()

    def leave_after_each_step(self) -> None:
        """Clients that leave the one engine or the other. What is given up then is not given up for its grant's sake."""
        self.grant_seconds = 3600.0
        self.run([partial(self.begin, {engine: n}) for engine in self.engines for n in range(LEAVING_STEPS)])

    def assert_nothing_is_left(self) -> None:
        self.site.assert_nothing_is_left()
        for engine in self.engines:
            assert engine.told.wrong_blocks == []
            assert set(engine.told.finished.values()) <= {"length", "stop"}
        assert self.num_left > 3


def _run(site: Site, shape: str, *, num_requests: int, victims: list[Victim], seed: int, **settings: Any) -> None:
    more: dict[str, Any] = {**PATIENT, **REUSE, **settings}
    lives = Lives(site, site.prefiller(shape, **more), site.decoder(shape, **more), random.Random(seed))
    for victim in victims:
        lives.run([lives.begin] * (num_requests // len(victims)), to_the_end=False)
        site.nodes.kill_agent(victim)
        lives.await_each_way()
    lives.run([])
    lives.leave_after_each_step()
    lives.await_each_way()
    lives.run([])
    lives.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ("checkpointed", {"admission": "wait", "caches_prefixes": True, "asynchronous": True}),
        ("windowed", {"admission": "preallocate"}),
    ],
)
def test_random_requests_and_two_kills_leave_nothing_behind(site: Site, shape: str, settings: dict[str, Any]) -> None:
    _run(site, shape, num_requests=16, victims=["west", "east"], seed=5, **settings)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("shape", "admission", "caches_prefixes"),
    [
        ("dense", "auto", True),
        ("windowed", "preallocate", False),
        ("recurrent", "wait", False),
        ("checkpointed", "auto", True),
        ("checkpointed and windowed", "preallocate", True),
    ],
)
def test_two_hundred_random_requests_and_three_kills_leave_nothing_behind(
    site: Site, shape: str, admission: str, caches_prefixes: bool, asynchronous: bool
) -> None:
    settings = {"admission": admission, "caches_prefixes": caches_prefixes, "asynchronous": asynchronous}
    _run(site, shape, num_requests=200, victims=["west", "east", "west"], seed=6, **settings)
