"""Cost of a decode step with the connector: without transfers, with 64 parked requests, and idle.

Three engines of one model, one of them without a connector and one with a connector that does nothing, answer the same batch
in turn. A parked request is a decode leg
whose KV never comes and most of whose prompt the engine's own prefix cache holds.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.connector.sites import grant_key, grant_of, parameters
from tools.demo.client import prompt_tokens
from tools.processes import Children
from tools.stack import AgentProcess, EngineProcess, Stack, engine_flags
from tools.tiny_models import VOCABULARY, make_model

FAMILY = "llama"
IDLE = ("benchmarks.connector.idle", "IdleConnector")
BLOCK_TOKENS = 32
HIT_TOKENS = 8192
NUM_PARKED = 64
NUM_SEQUENCES, OUTPUT_TOKENS = 4, 150
REPEATS, WARM_UP = 14, 1  # Short alternating runs, since other load changes over seconds.
SPIN_SECONDS = 4.0
BAR_PARKED_RATIO = 0.10
PATIENT_SECONDS = 900.0


class StepCost(NamedTuple):
    """Seconds of one step; CPU time is of all threads of the engine and its server, and says little of other programs."""

    wall: float
    cpu: float


@dataclass
class Engines:
    """An engine with the connector, one with an idle connector, one without, and the agent beside the first."""

    agent: AgentProcess
    connected: EngineProcess
    idle: EngineProcess
    bare: EngineProcess
    key: bytes
    held: list[int]  # Tokens in the prefix caches of both engines.

    def step(self, engine: EngineProcess) -> StepCost:
        """Return a decode step of the batch, the engine's server included."""
        prompts = [[*self.held, token] for token in range(NUM_SEQUENCES)]
        body = {"model": FAMILY, "prompt": prompts, "temperature": 0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        pid = engine.child.process.pid
        start, cpu = time.perf_counter(), _cpu_seconds(pid)
        self._read(engine, body)
        wall, cpu = time.perf_counter() - start, _cpu_seconds(pid) - cpu
        return StepCost(wall / OUTPUT_TOKENS, cpu / OUTPUT_TOKENS)

    def _read(self, engine: EngineProcess, body: dict[str, Any]) -> None:
        connection = _post(engine, body)
        try:
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
        finally:
            connection.close()

    @contextmanager
    def parked(self, count: int) -> Iterator[None]:
        """So many decode legs that wait for KV; their clients leave in the end."""
        connections = [_post(self.connected, self._leg(number)) for number in range(count)]
        _await(lambda: self._num_waiting() == count)
        try:
            yield
        finally:
            for connection in connections:
                connection.close()
            _await(lambda: self._num_waiting() == 0)

    def _num_waiting(self) -> int:
        """Requests that wait; an engine counts them when it computes something, so it is asked something first."""
        self._read(self.connected, {"model": FAMILY, "prompt": self.held[:16], "max_tokens": 1})
        with urllib.request.urlopen(f"{self.connected.url}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_waiting{")))

    def _leg(self, number: int) -> dict[str, Any]:
        prompt = [*self.held, *prompt_tokens(BLOCK_TOKENS, seed=number, vocabulary=VOCABULARY)]
        grant = grant_of(
            FAMILY, prompt, source=self.agent, destination=self.agent, key=self.key, seconds=PATIENT_SECONDS
        )
        body = {"model": FAMILY, "prompt": prompt, "temperature": 0, "max_tokens": 1}
        return body | {"kv_transfer_params": parameters("do_remote_prefill", grant)}

    def cpu_ratio(self) -> float:
        """Share of a core that the connected engine's processes use in the next seconds."""
        before = _cpu_seconds(self.connected.child.process.pid)
        time.sleep(SPIN_SECONDS)
        return (_cpu_seconds(self.connected.child.process.pid) - before) / SPIN_SECONDS


def measure() -> dict[str, Any]:
    """Step times turn by turn, and the share of a core that waiting takes."""
    with tempfile.TemporaryDirectory(prefix="prfaas-steps-") as directory, _running(Path(directory)) as engines:
        ways: dict[str, Callable[[], StepCost]] = {
            "without connector": lambda: engines.step(engines.bare),
            "without connector, again": lambda: engines.step(engines.bare),
            "idle connector": lambda: engines.step(engines.idle),
            "with connector": lambda: engines.step(engines.connected),
            "with connector, 64 parked": lambda: _beside_parked(engines),
        }
        costs: dict[str, list[StepCost]] = {name: [] for name in ways}
        for turn in range(WARM_UP + REPEATS):
            for name in _rotated(list(ways), turn):
                value = ways[name]()
                if turn >= WARM_UP:
                    costs[name].append(value)
        spinning = {"nothing": engines.cpu_ratio()}
        for count in (1, NUM_PARKED):
            with engines.parked(count):
                spinning[f"{count} parked"] = engines.cpu_ratio()
    return {
        "family": FAMILY,
        "batch": NUM_SEQUENCES,
        "context_tokens": HIT_TOKENS,
        "block_tokens": BLOCK_TOKENS,
        "wall": _table({name: [value.wall for value in values] for name, values in costs.items()}),
        "cpu": _table({name: [value.cpu for value in values] for name, values in costs.items()}),
        "bar_parked": BAR_PARKED_RATIO,
        "cores_used_while_waiting": {name: round(value, 3) for name, value in spinning.items()},
    }


def _table(seconds: dict[str, list[float]]) -> dict[str, Any]:
    bare, again, idle, connected, parked = seconds.values()
    return {
        "step_milliseconds": {name: _spread([1e3 * value for value in values]) for name, values in seconds.items()},
        "noise": _growth(again, bare),
        "added_by_an_idle_connector": _growth(idle, bare),
        "added_without_transfers": _growth(connected, bare),
        "added_beyond_an_idle_connector": _growth(connected, idle),
        "added_by_64_parked": _growth(parked, connected),
    }


def _rotated(names: list[str], by: int) -> list[str]:
    """Another order in each turn: none of them always comes after the same one."""
    by %= len(names)
    return names[by:] + names[:by]


def _beside_parked(engines: Engines) -> StepCost:
    with engines.parked(NUM_PARKED):
        return engines.step(engines.connected)


def _growth(values: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """By how much each turn's value is more than its base in the same turn, as a share, with the middle half of the turns."""
    growth = sorted(value / item - 1 for value, item in zip(values, base, strict=True))
    quarter = len(growth) // 4
    half = {"lower_quartile": round(growth[quarter], 4), "upper_quartile": round(growth[-1 - quarter], 4)}
    return _spread(growth) | half


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


@contextmanager
def _running(directory: Path) -> Iterator[Engines]:
    model = make_model(FAMILY, directory / FAMILY)
    with Children(directory) as children:
        stack = Stack(children, directory)
        agent = stack.start_agent("agent", open_timeout_seconds=f"{PATIENT_SECONDS:.0f}s")
        stack.await_agent(agent)
        chosen = engine_flags(chunk_tokens=256, max_model_len=HIT_TOKENS + 2 * OUTPUT_TOKENS)
        flags = tuple("--enable-prefix-caching" if item == "--no-enable-prefix-caching" else item for item in chosen)
        flags += ("--block-size", str(BLOCK_TOKENS))
        settings = {"reuse": False, "silence_seconds": f"{PATIENT_SECONDS:.0f}s"}
        connected = stack.start_engine("connected", model, agent=agent, role="kv_both", extra=flags, connector=settings)
        idle = stack.start_engine("idle", model, agent=agent, role="kv_both", extra=flags, connector_class=IDLE)
        bare = stack.start_engine("bare", model, agent=None, role="", extra=flags)
        for engine in (connected, idle, bare):
            stack.await_server(engine.child, engine.url)
        held = prompt_tokens(HIT_TOKENS, seed=1, vocabulary=VOCABULARY)
        yield Engines(agent, connected, idle, bare, grant_key(stack), held)


def _post(engine: EngineProcess, body: dict[str, Any]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("the parked requests neither wait nor leave")
        time.sleep(0.05)


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process and its descendants."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = [
        item for task in Path(f"/proc/{pid}/task").iterdir() for item in (task / "children").read_text().split()
    ]
    spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent + sum(_cpu_seconds(int(child)) for child in children)
