"""Speed of the twin in CPU seconds beside a public simulator, and its reproducibility."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator

from benchmarks.twin.figure import Figure
from benchmarks.twin.peer import dynamo_requests_per_second
from prfaas.sim.report import to_json
from prfaas.sim.run import simulate
from prfaas.sim.scenario import Scenario
from tools.reference_tables import ROOT

_REPEATS = 5
_FULL = Scenario(
    fidelity="instances",
    turns="2048>128,256>128,256>128",
    local_policy="ppd",
    ppd_table=ROOT / "tests/data/ppd-table-2P2D.json",
    requests=2_000,
)


def speed() -> Iterator[Figure]:
    """Simulated requests per CPU second, the plan and the drawing of the traffic counted."""
    peer = _rates(lambda: dynamo_requests_per_second(20_000) or 0.0)
    shown = f"Dynamo's offline replay, 4 workers, 2,048 in, 128 out, req per CPU second: {peer}"
    shown = shown if peer["max"] else "DYNAMO_PYTHON not set"
    stations = _rates(lambda: _requests_per_second(Scenario(requests=40_000)))
    name = "threshold policy, an event per request and stage, req per CPU second"
    yield Figure(name, stations, "at least 20,000", stations["median"] >= 20_000, shown)
    routed = _rates(lambda: _requests_per_second(_FULL, rate=20.0))
    name = "full route, pools and the view of them, conversations of three turns, req per CPU second"
    yield Figure(name, routed, "at least 3,000", routed["median"] >= 3_000, shown)
    factor = _rates(_times_real_time)
    yield Figure("96 GPUs at iteration level, times real time", factor, "at least 20", factor["median"] >= 20)


def _rates(run: Callable[[], float]) -> dict[str, float]:
    """Median, least and greatest rate, warmed up."""
    run()
    rates = sorted(run() for _ in range(_REPEATS))
    return {"median": round(statistics.median(rates)), "min": round(rates[0]), "max": round(rates[-1])}


def _requests_per_second(scenario: Scenario, *, rate: float | None = None) -> float:
    started = time.process_time()
    run = simulate(scenario, rate=rate)
    return run.summary.num_requests / (1.0 - scenario.warmup) / (time.process_time() - started)


def _times_real_time() -> float:
    started = time.process_time()
    run = simulate(Scenario(fidelity="instances", load="80%", requests=10_000))
    return 10_000 / run.rate / (time.process_time() - started)


def reproducible() -> Iterator[Figure]:
    """Two runs of one seed."""
    for fidelity in ("stations", "instances"):
        scenario = Scenario(fidelity=fidelity, requests=5_000, seed=11)
        first, again = (json.dumps(to_json("run", simulate(scenario))) for _ in range(2))
        yield Figure(f"{fidelity}: same seed, same bytes", first == again, "true", first == again)
