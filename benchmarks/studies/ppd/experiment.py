"""PPD's runs: Poisson conversations for ten seconds on one deployment, their averages by turn, and tables made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.studies.ppd.deployments import LaterTurns, conversations, twin
from benchmarks.studies.ppd.model import GRID_HARNESS, MODEL, TURN_HARNESS, Harness, PpdModel
from prfaas.ppd.table import FIRST_TURNS, QPS, SECOND_TURNS, PpdRun, build_table
from prfaas.scheduler.ppd import ContextClass, PpdTable, TableCell, WorkloadType
from prfaas.sim.command import Progress, on_all_cores
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.workload.conversations import Turn

ARRIVAL_SECONDS = 10.0
# Longest turn from the moment when the client sends it; some measured runs without failures waited longer.
TIMEOUT_SECONDS = 30.0
MIN_CONVERSATIONS = 3


@dataclass(frozen=True)
class Effort:
    """Each run once for each seed, under these costs and this harness."""

    model: PpdModel = MODEL
    harness: Harness = GRID_HARNESS
    seeds: tuple[int, ...] = (1, 2)


def converse(
    configuration: str,
    scripts: Sequence[Sequence[Turn]],
    *,
    qps: float,
    effort: Effort,
    seed: int,
    later: LaterTurns | None = None,
    count: int | None = None,
) -> list[SimulatedRequest]:
    """Return the requests of all turns of a run, in order of arrival; conversations take the scripts in turn.

    `count` conversations arrive, or those of `ARRIVAL_SECONDS`.
    """
    generator = np.random.default_rng(seed)
    count = count or max(MIN_CONVERSATIONS, round(qps * ARRIVAL_SECONDS))
    times = np.sort(generator.uniform(0.0, count / qps, count)).tolist()
    opening = conversations(scripts, effort.harness)
    run = twin(configuration, scripts, effort.model, harness=effort.harness, later=later)
    run.run(opening.first(session, time) for session, time in enumerate(times))
    return run.requests


@dataclass(frozen=True)
class TurnFigures:
    """Averages of one turn, as the authors print them, and the share of its requests within the time-out."""

    ttft_seconds: float
    tpot_seconds: float
    success_ratio: float


def measure(
    configuration: str, turns: Sequence[Turn], *, qps: float, effort: Effort | None = None
) -> list[TurnFigures]:
    """Averages of each turn, over all seeds."""
    effort = effort or Effort()
    runs = [converse(configuration, [turns], qps=qps, effort=effort, seed=seed) for seed in effort.seeds]
    requests = [request for run in runs for request in run]
    return [_figures([request for request in requests if request.turn == turn + 1]) for turn in range(len(turns))]


def _figures(requests: Sequence[SimulatedRequest]) -> TurnFigures:
    count = len(requests)
    in_time = sum(request.end_to_end <= TIMEOUT_SECONDS for request in requests)
    ttft, tpot = (math.fsum(request.ttft for request in requests), math.fsum(request.tpot for request in requests))
    return TurnFigures(ttft / count, tpot / count, in_time / count)


def workload(context: ContextClass, kind: WorkloadType) -> tuple[Turn, Turn]:
    """Both turns of one of the 18 workloads."""
    return Turn(*FIRST_TURNS[context]), Turn(*SECOND_TURNS[kind])


# In this harness no turn strays to another node.
_CLEAN = Effort(harness=TURN_HARNESS)


def _turn_2(cell: tuple[str, ContextClass, WorkloadType, float]) -> PpdRun:
    configuration, context, kind, qps = cell
    later = measure(configuration, workload(context, kind), qps=qps, effort=_CLEAN)[1]
    return PpdRun(TableCell(context, kind, qps), later.ttft_seconds, later.tpot_seconds, later.success_ratio)


def ppd_table(
    num_prefill: int,
    num_decode: int,
    *,
    progress: Progress,
    ttft_weight: float = 1.0,
    tpot_weight: float = 1.0,
    rates: Sequence[float] = QPS,
) -> PpdTable:
    """Return the table of a deployment as managers load it: every workload and rate, simulated both ways, on all cores."""
    cells = [
        (f"{num_prefill}P_{num_decode}{way}", context, kind, qps)
        for way in ("D", "pD")
        for context in FIRST_TURNS
        for kind in SECOND_TURNS
        for qps in rates
    ]
    runs = on_all_cores(_turn_2, cells, progress)
    half = len(runs) // 2
    return build_table(runs[:half], runs[half:], ttft_weight=ttft_weight, tpot_weight=tpot_weight)
