"""The same scenarios on vLLM's scheduler over a model that computes nothing and on two real engines: their counters agree.

The real ones keep their KV in fp8, in as few blocks as the others; what they answer is compared too.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import pytest

from prfaas.hashing import HashChain, root_hash
from tests.conformance.scheduled_engine import BLOCK_TOKENS, ScheduledEngine
from tests.conformance.site import SHAPES
from tests.e2e.pair import Pair, counts, outcome, random_prompt, running_pair
from tests.integration.connector.nodes import prompt_of
from tests.integration.connector.vllm_caches import caches_of, config_of
from tests.support.waiting import wait_until
from tools.demo.client import REQUEST_SECONDS, get_json, get_text
from tools.stack import AgentProcess, EngineProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
FAMILY, SILENT = "llama", "without a model"
NUM_BLOCKS = 24  # of which vLLM keeps one
CHUNK_TOKENS = 256
LENGTH = 301  # of prompts: ten blocks travel
LOADED, PREEMPTED = "loaded blocks", "preempted"  # beside transfers by direction and outcome, and why answers ended
MIN_DISTINCT = 6  # of 24 tokens: fewer, and two different computations might agree by chance
FLAGS: dict[str, Any] = {"kv-cache-dtype": "fp8", "block-size": BLOCK_TOKENS, "num-gpu-blocks-override": NUM_BLOCKS}
FLAGS |= {"max-model-len": (NUM_BLOCKS - 2) * BLOCK_TOKENS, "scheduling-policy": "priority"}


class Engines(Protocol):
    """One engine prefills, the other one decodes."""

    pair: Pair  # whose agents they are beside

    def grant(self, prompt: Sequence[int]) -> str: ...

    def prefill(self, prompt: Sequence[int], grant: str) -> None: ...

    def decode(
        self, prompt: Sequence[int], grant: str = "", *, answers: int = 1, answer_tokens: int = 3, priority: int = 0
    ) -> None:
        """Without a grant the prompt is an ordinary one."""

    def leave(self) -> None:
        """All clients go away."""

    def until(self, fact: Callable[[], bool], what: str) -> None:
        """The engines run until then."""

    def are_done(self) -> bool: ...

    def counters(self) -> Counter[str]: ...

    def close(self) -> None: ...


class SilentEngines:
    """Engines that compute nothing. They run where a test waits."""

    def __init__(self, pair: Pair, model: Path) -> None:
        self.pair = pair
        self._numbers = itertools.count()
        self._asked: list[tuple[ScheduledEngine, str]] = []
        self._east = self._start(model, pair.east, "kv_producer")
        self._west = self._start(model, pair.west, "kv_both")

    def _start(self, model: Path, agent: AgentProcess, role: str) -> ScheduledEngine:
        kv = config_of(*SHAPES["dense"], num_blocks=NUM_BLOCKS)
        caches = caches_of(kv)
        self._block_bytes = sum(cache[0].nbytes for cache in caches.values())
        return ScheduledEngine(
            model,
            agent.socket,
            kv,
            caches,
            name=f"{agent.name} {SILENT}",
            identity=SILENT,
            role=role,
            chunk_tokens=CHUNK_TOKENS,
            caches_prefixes=True,
            policy="priority",
        )

    def close(self) -> None:
        for engine in (self._east, self._west):
            engine.close()

    def grant(self, prompt: Sequence[int]) -> str:
        return self.pair.grant(prompt, prompt_hash=HashChain(root_hash(SILENT), prompt[:-1]).at(len(prompt) - 1))

    def prefill(self, prompt: Sequence[int], grant: str) -> None:
        self._ask(self._east, prompt[:-1], _parameters("do_remote_decode", grant), answer_tokens=1)

    def decode(
        self, prompt: Sequence[int], grant: str = "", *, answers: int = 1, answer_tokens: int = 3, priority: int = 0
    ) -> None:
        parameters = _parameters("do_remote_prefill", grant)
        for _ in range(answers):  # vLLM's server makes a request of each
            self._ask(self._west, prompt, parameters, answer_tokens=answer_tokens, priority=priority)

    def _ask(self, engine: ScheduledEngine, prompt: Sequence[int], parameters: dict[str, Any], **more: Any) -> None:
        request_id = str(next(self._numbers))
        self._asked.append((engine, request_id))
        engine.submit(request_id, prompt, parameters, **more)

    def leave(self) -> None:
        unanswered = [its for its in self._asked if its[1] not in its[0].told.finished]
        for engine, request_id in unanswered:
            engine.abort(request_id)
            self._asked.remove((engine, request_id))

    def until(self, fact: Callable[[], bool], what: str) -> None:
        wait_until(lambda: self._east.step() >= 0 and self._west.step() >= 0 and fact(), what=what)

    def are_done(self) -> bool:
        return all(request_id in engine.told.finished for engine, request_id in self._asked)

    def counters(self) -> Counter[str]:
        east, west = self._east.told, self._west.told
        ends = Counter((*east.finished.values(), *west.finished.values()))
        preempted = sum(engine.num_preemptions(its) for engine, its in self._asked if engine is self._west)
        loaded = self._west.loaded_bytes // self._block_bytes
        return ends + east.outcomes + west.outcomes + Counter({LOADED: loaded, PREEMPTED: preempted})


class RealEngines:
    """A pair of servers, each request to which has a connection of its own."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._threads = ThreadPoolExecutor(16)
        self._asked: list[tuple[http.client.HTTPConnection, Future[list[str]]]] = []

    def close(self) -> None:
        self._threads.shutdown()

    def grant(self, prompt: Sequence[int]) -> str:
        return self.pair.grant(prompt)

    def prefill(self, prompt: Sequence[int], grant: str) -> None:
        parameters = _parameters("do_remote_decode", grant)
        self._ask(self.pair.prefill, prompt[:-1], max_tokens=1, kv_transfer_params=parameters)

    def decode(
        self, prompt: Sequence[int], grant: str = "", *, answers: int = 1, answer_tokens: int = 3, priority: int = 0
    ) -> None:
        its = {"max_tokens": answer_tokens, "priority": priority, "n": answers, "temperature": float(answers > 1)}
        parameters = _parameters("do_remote_prefill", grant)
        self._ask(self.pair.decode, prompt, kv_transfer_params=parameters, **its)

    def _ask(self, engine: EngineProcess, prompt: Sequence[int], **more: Any) -> None:
        connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=REQUEST_SECONDS)
        body = {"model": self.pair.family, "ignore_eos": True, "prompt": list(prompt), "stream": True} | more
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        self._asked.append((connection, self._threads.submit(_ends, connection)))

    def leave(self) -> None:
        for connection, ends in self._asked:
            if not ends.done() and connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)

    def until(self, fact: Callable[[], bool], what: str) -> None:
        wait_until(fact, what=what)

    def are_done(self) -> bool:
        return all(ends.done() for _, ends in self._asked)

    def counters(self) -> Counter[str]:
        answered = [ends.result() for _, ends in self._asked if ends.done() and ends.exception() is None]
        total = Counter(itertools.chain.from_iterable(answered))
        east, west = counts(self.pair.prefill), counts(self.pair.decode)
        for name, count in (*east.items(), *west.items()):
            if found := re.fullmatch(r'prfaas_connector_transfers_total{direction="(.+)",outcome="(.+)"}', name):
                total[" ".join(found.groups())] += int(count)
        (group,) = self.pair.layout().groups
        total[LOADED] = (
            int(west.get('prfaas_connector_copied_bytes_total{direction="receive"}', 0)) // group.block_bytes
        )
        page = get_text(f"{self.pair.decode.url}/metrics")
        total[PREEMPTED] = sum(int(float(its)) for its in re.findall(r"vllm:num_preemptions_total{.*} (.+)", page))
        return total


def _ends(connection: http.client.HTTPConnection) -> list[str]:
    """Why each answer of a stream has ended."""
    with contextlib.closing(connection):
        lines = [line[6:] for line in connection.getresponse() if line.startswith(b"data: {")]
    choices = itertools.chain.from_iterable(json.loads(line)["choices"] for line in lines)
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


def _parameters(direction: str, grant: str) -> dict[str, Any]:
    return {direction: True, "prfaas_grant": grant} if grant else {}


# The scenarios


def _its_kv_comes(engines: Engines) -> None:
    _transfer(engines, prompt_of(1, LENGTH))


def _transfer(engines: Engines, prompt: Sequence[int], *, answers: int = 1) -> None:
    grant = engines.grant(prompt)
    engines.decode(prompt, grant, answers=answers)
    engines.prefill(prompt, grant)


def _two_answers_to_one_prompt(engines: Engines) -> None:
    _transfer(engines, prompt_of(2, LENGTH), answers=2)


def _the_client_leaves_while_it_is_parked(engines: Engines) -> None:
    prompt = prompt_of(3, LENGTH)
    engines.decode(prompt, engines.grant(prompt))
    engines.until(lambda: _status(engines.pair.west)["receiving"] == 1, "the claim")
    engines.leave()


def _six_blocks_are_the_engines_own(engines: Engines) -> None:
    engines.decode(prompt_of(4, 6 * BLOCK_TOKENS + 8))
    engines.until(engines.are_done, "the first answer")
    _transfer(engines, prompt_of(4, LENGTH))


def _fewer_blocks_than_requests_want(engines: Engines, *, first_seed: int = 5, urgency: int = 0) -> None:
    """Two requests of ten blocks fit, and do not once they have grown."""
    prompts = [prompt_of(seed, LENGTH) for seed in range(first_seed, first_seed + 5)]
    grants = [engines.grant(prompt) for prompt in prompts]
    come = _num_come(engines.pair)
    for prompt, grant in zip(prompts, grants, strict=True):
        engines.prefill(prompt, grant)
    engines.until(lambda: _num_come(engines.pair) == come + len(prompts), "all KV")
    for number, (prompt, grant) in enumerate(zip(prompts, grants, strict=True)):
        engines.decode(prompt, grant, answer_tokens=120, priority=-number * urgency)


def _fewer_blocks_and_the_last_is_the_most_urgent(engines: Engines) -> None:
    _fewer_blocks_than_requests_want(engines, first_seed=10, urgency=1)


SCENARIOS: list[tuple[Callable[[Engines], None], dict[str, int]]] = [
    (_its_kv_comes, {"send completed": 1, "receive completed": 1, LOADED: 10, "length": 2}),
    # How much the first answer's load brings that the second one has not computed is chance.
    (_two_answers_to_one_prompt, {"send completed": 1, "receive completed": 1, "receive in_use": 1, "length": 3}),
    (_the_client_leaves_while_it_is_parked, {"receive aborted": 1}),
    (_six_blocks_are_the_engines_own, {"send completed": 1, "receive completed": 1, LOADED: 4, "length": 3}),
    *(
        (its, {"send completed": 5, "receive completed": 5, LOADED: 50, "length": 10, PREEMPTED: 1})
        for its in (_fewer_blocks_than_requests_want, _fewer_blocks_and_the_last_is_the_most_urgent)
    ),
]


def _status(agent: AgentProcess) -> dict[str, Any]:
    status: dict[str, Any] = get_json(f"{agent.status_url}/status")
    return status


def _num_come(pair: Pair) -> int:
    transfers = get_json(f"{pair.west.status_url}/transfers")
    return sum((transfer["direction"], transfer["outcome"]) == ("in", "completed") for transfer in transfers)


def _nothing_is_left(pair: Pair) -> bool:
    both = [_status(its) for its in (pair.east, pair.west)]
    return all(its["pool"]["transfer"] + its["sending"] + its["receiving"] == 0 for its in both)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    extra = tuple(word for name, value in FLAGS.items() for word in (f"--{name}", str(value)))
    directory = tmp_path_factory.mktemp("real")
    with running_pair(
        FAMILY, directory, extra=(*extra, "--enable-prefix-caching"), connector={"reuse": False}
    ) as running:
        yield running


@pytest.fixture(scope="module", params=[SILENT, "real"])
def engines(request: pytest.FixtureRequest, real: Pair) -> Iterator[Engines]:
    is_real = request.param == "real"
    made = RealEngines(real) if is_real else SilentEngines(real, real.east.socket.parent / FAMILY)
    with contextlib.closing(made):
        yield made


@pytest.mark.parametrize(("scenario", "wanted"), SCENARIOS, ids=[its.__name__ for its, _ in SCENARIOS])
def test_both_kinds_of_engines_count_the_same(
    engines: Engines, scenario: Callable[[Engines], None], wanted: dict[str, int]
) -> None:
    before = engines.counters()

    def counted() -> dict[str, int]:
        its = dict(engines.counters() - before)
        if PREEMPTED in its:
            its[PREEMPTED] = 1  # how often is chance
        if LOADED not in wanted:
            its.pop(LOADED, None)
        return its

    scenario(engines)
    engines.until(engines.are_done, "all answers")
    with contextlib.suppress(AssertionError):  # what differs is said below
        engines.until(lambda: counted() == wanted, "the counters")
    assert counted() == wanted
    engines.until(lambda: _nothing_is_left(engines.pair), "idle agents")


@pytest.mark.parametrize("length", [257, 513, 600])
def test_kv_in_fp8_gives_the_tokens_of_one_engine(real: Pair, length: int) -> None:
    assert "kv_cache_dtype=fp8" in real.layout().packing
    prompt = random_prompt(length, seed=length)
    before = counts(real.decode).get(outcome("receive", "completed"), 0)
    wanted = real.alone(prompt)
    assert real.through_both(prompt) == wanted and len(set(wanted)) >= MIN_DISTINCT
    assert counts(real.decode)[outcome("receive", "completed")] == before + 1
