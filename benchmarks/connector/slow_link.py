"""A link that falls to a tenth of its rate under load: whether the prefill engine's steps notice.

Prefill legs come at fixed times, whatever becomes of those before them. At first the link takes more than they send; then,
for a minute, a tenth of that: the sending node's transfer blocks run out, and most prefills go without a transfer.
"""

from __future__ import annotations

import collections
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.connector.distance import payload_bytes
from benchmarks.connector.sites import (
    CHUNK_TOKENS,
    FAMILY,
    TIMED,
    grant_key,
    grant_of,
    logged,
    parameters,
    separated,
    start_agents,
)
from tools.demo.client import complete, prompt_tokens
from tools.processes import Children
from tools.stack import AgentProcess, EngineProcess, Stack, attached_layout, engine_flags
from tools.tiny_models import VOCABULARY, make_model
from tools.wan import PAYLOAD_RATIO, Wan, WanShape

PROMPT_TOKENS = 4 * CHUNK_TOKENS + 1
RTT_SECONDS = 0.030
LOAD_RATIO = 0.5  # Share of the prefill capacity.
LINK_RATIO = 1.5  # Initial link rate over that load.
SLOW_RATIO = 0.1
FULL_SECONDS, SLOW_SECONDS = 60.0, 60.0  # Equal, since the maximum grows with the number of steps.
GRANT_SECONDS = 5.0
POOL = {"pool_bytes": "8MiB"}  # Small, so that transfer blocks run out within a minute.
BAR_GROWTH = 0.20


@dataclass
class Load:
    """Prefill legs from the far engine to the near agent, where nobody claims them."""

    wan: Wan
    near: AgentProcess
    far: AgentProcess
    engine: EngineProcess
    key: bytes
    num_prompts: int = 0

    def prefill(self) -> float:
        """Return one leg; seconds until its token."""
        self.num_prompts += 1
        prompt = prompt_tokens(PROMPT_TOKENS, seed=self.num_prompts, vocabulary=VOCABULARY)
        grant = grant_of(FAMILY, prompt, source=self.far, destination=self.near, key=self.key, seconds=GRANT_SECONDS)
        body = {"model": FAMILY, "prompt": prompt[:-1], "temperature": 0, "max_tokens": 1}
        body["kv_transfer_params"] = parameters("do_remote_decode", grant)
        return complete(self.engine.url, body).ttft_seconds

    def run(self, seconds: float, *, every: float) -> None:
        """Legs at fixed times."""
        start = time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            legs: list[Future[float]] = []
            while (due := start + len(legs) * every) < start + seconds:
                time.sleep(max(0.0, due - time.monotonic()))
                legs.append(pool.submit(self.prefill))
            for leg in legs:
                leg.result()


def measure() -> dict[str, Any]:
    """Step times at both rates, and how the transfers ended."""
    with (
        tempfile.TemporaryDirectory(prefix="prfaas-slow-") as name,
        Wan(WanShape(1e9, RTT_SECONDS)) as wan,
        Children(Path(name)) as children,
    ):
        load = _start(children, Path(name), wan)
        with separated([load.engine.child]):
            return _measured(load)


def _measured(load: Load) -> dict[str, Any]:
    for _ in range(5):
        load.prefill()
    every = statistics.median(load.prefill() for _ in range(9)) / LOAD_RATIO
    sent = payload_bytes(attached_layout(load.engine.child.log), PROMPT_TOKENS - 1)
    rate = LINK_RATIO * sent / every * 8 / PAYLOAD_RATIO
    load.wan.set(WanShape(rate, RTT_SECONDS))
    began = [time.perf_counter()]
    load.run(FULL_SECONDS, every=every)
    load.wan.set(WanShape(rate * SLOW_RATIO, RTT_SECONDS))
    began.append(time.perf_counter())
    load.run(SLOW_SECONDS, every=every)
    steps = [item for item in logged(load.engine.child, "step.cost") if item["num_tokens"] == CHUNK_TOKENS]
    outcomes = collections.Counter(item["outcome"] for item in logged(load.engine.child, "request.sent"))
    full = [step for step in steps if began[0] <= step["began"] < began[1]]
    slow = [step for step in steps if step["began"] >= began[1]]
    return {
        "family": FAMILY,
        "prompt_tokens": PROMPT_TOKENS,
        "requests_per_second": round(1 / every, 2),
        "bits_per_second": {"full": round(rate), "slow": round(rate * SLOW_RATIO)},
        "seconds": {"full": FULL_SECONDS, "slow": SLOW_SECONDS},
        "step_milliseconds": {"full": _steps(full), "slow": _steps(slow)},
        "growth": {
            "longest": round(_longest(slow, "wall_seconds") / _longest(full, "wall_seconds") - 1, 3),
            "longest_by_cpu_time": round(_longest(slow, "step_seconds") / _longest(full, "step_seconds") - 1, 3),
            "bar": BAR_GROWTH,
        },
        "longest_in_hooks_milliseconds": {  # CPU and waits of the connector; preemption counts too.
            "full": round(1e3 * _longest(full, "hook_wall_seconds"), 3),
            "slow": round(1e3 * _longest(slow, "hook_wall_seconds"), 3),
        },
        "transfers": dict(outcomes),
    }


def _longest(steps: Sequence[dict[str, Any]], name: str) -> float:
    return max(float(step[name]) for step in steps)


def _steps(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    walls = sorted(1e3 * step["wall_seconds"] for step in steps)
    last = len(walls) - 1
    at = {"median": walls[last // 2], "p99": walls[round(0.99 * last)], "max": walls[last]}
    return {"count": len(walls), **{name: round(value, 3) for name, value in at.items()}}


def _start(children: Children, directory: Path, wan: Wan) -> Load:
    model = make_model(FAMILY, directory / FAMILY)
    stack = Stack(children, directory)
    near, far = start_agents(children, stack, wan, **POOL)
    flags = engine_flags(chunk_tokens=CHUNK_TOKENS, max_model_len=PROMPT_TOKENS + 256)
    prefill = stack.start_engine("prefill", model, agent=far, role="kv_producer", extra=flags, connector_class=TIMED)
    receiver = stack.start_engine("receiver", model, agent=near, role="kv_consumer", extra=flags)
    for engine in (prefill, receiver):
        stack.await_server(engine.child, engine.url)
    return Load(wan, near, far, prefill, grant_key(stack))
