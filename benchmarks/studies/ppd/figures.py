"""The runs behind Figures 1, 4 and 5 of PPD's paper: frontiers, latency over load, and what weighing TPOT trades."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.studies.ppd.chats import DATA_SETS
from benchmarks.studies.ppd.deployments import GRID, LaterTurns, kinds
from benchmarks.studies.ppd.experiment import TIMEOUT_SECONDS, Effort, converse, ppd_table
from benchmarks.studies.ppd.model import TURN_HARNESS
from prfaas.errors import ConfigError
from prfaas.scheduler.ppd import PpdTable
from prfaas.sim.command import Progress, on_all_cores
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.summary import Distribution, distribution
from prfaas.sim.workload.conversations import Turn

# Figure 1: 10,000 prompt tokens and 100 of answers over five turns, at three loads.
LONG_CONVERSATION = (Turn(8000, 20), *(Turn(500, 20) for _ in range(4)))
# In conversations per second.
LOADS = (0.5, 1.0, 2.0)
# Figure 4: as many conversations as the authors ran, at their rates.
NUM_CHATS = 500
CHAT_QPS = (2.0, 4.0, 8.0, 12.0)
SPLITS = ((1, 3), (2, 2), (3, 1))
# Figure 5: 1P_3D at 8 conversations per second, of those above the ones whose later turns bring more than they ask for.
HEAVY_QPS = 8.0
RATIOS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
WEIGHTS = (20.0, 10.0, 6.0, 3.0, 1.0)
Tables = Mapping[tuple[int, int], PpdTable]
# Conversations by the name of their data set.
Chats = Mapping[str, Sequence[Sequence[Turn]]]
_EFFORT = Effort(harness=TURN_HARNESS)


@dataclass(frozen=True)
class Case:
    """One run: who serves which scripts at how many conversations per second, and how later turns are prefilled."""

    configuration: str
    scripts: Sequence[Sequence[Turn]]
    qps: float
    later: LaterTurns | None = None
    seed: int = 1
    # Number of conversations; None takes the arrivals of ten seconds.
    count: int | None = None


@dataclass(frozen=True)
class Outcome:
    """Results of one run.

    All turns: P99 TTFT, tokens per second, latency, number of timeouts and preemptions. Later turns: mean TTFT and TPOT,
    and the share that their decode node prefilled.
    """

    ttft_p99_seconds: float
    tokens_per_second: float
    latency: Distribution
    num_late: int
    num_preemptions: int
    later_ttft_seconds: float
    later_tpot_seconds: float
    local_ratio: float


def outcome(case: Case) -> Outcome:
    """Run it."""
    requests = converse(
        case.configuration,
        case.scripts,
        qps=case.qps,
        effort=_EFFORT,
        seed=case.seed,
        later=case.later,
        count=case.count,
    )
    later = [request for request in requests if request.turn > 1]
    tokens = sum(request.num_output_tokens for request in requests)
    return Outcome(
        float(np.quantile([request.ttft for request in requests], 0.99)),
        tokens / max(request.decode_end for request in requests),
        distribution(np.array([request.end_to_end for request in requests])),
        sum(request.end_to_end > TIMEOUT_SECONDS for request in requests),
        sum(request.num_preemptions for request in requests),
        _mean([request.ttft for request in later]),
        _mean([request.tpot for request in later]),
        sum(_is_local(request) for request in later) / len(later),
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _is_local(request: SimulatedRequest) -> bool:
    return request.transfer_end == request.prefill_end


def prefills_later_turns(configuration: str) -> bool:
    """Return whether some decode node of it prefills later turns itself, replicas left aside."""
    return "pD" in kinds(configuration)


def frontiers(progress: Progress) -> list[tuple[Case, Outcome]]:
    """Figure 1: all 17 configurations at each load."""
    return _run([Case(name, (LONG_CONVERSATION,), qps) for qps in LOADS for name in GRID], progress)


def drawn() -> Chats:
    """Conversations as long as those of each data set that the authors ran."""
    return {name: chats.draw(NUM_CHATS, seed=5) for name, chats in DATA_SETS.items()}


def multi_turn(scripts: Sequence[Sequence[Turn]]) -> list[Sequence[Turn]]:
    """Return recorded conversations with a second turn, evenly chosen, as many as the authors took.

    Raises:
        ConfigError: there is none.
    """
    several = [script for script in scripts if len(script) > 1]
    if not several:
        raise ConfigError("conversations: none of them has a second turn")
    return several[:: max(1, len(several) // NUM_CHATS)][:NUM_CHATS]


def heavy(chats: Chats) -> list[Sequence[Turn]]:
    """Return those whose later turns bring more new tokens than answers have; all where none does."""
    everyone = [script for scripts in chats.values() for script in scripts]
    return [chat for chat in everyone if _is_heavy(chat[1:])] or everyone


def _is_heavy(turns: Sequence[Turn]) -> bool:
    return sum(turn.num_new_tokens for turn in turns) > sum(turn.num_output_tokens for turn in turns)


def tables_of_splits(progress: Progress) -> Tables:
    """Return the decision table of each split, simulated at the rates that are asked here."""
    return {split: ppd_table(*split, rates=CHAT_QPS, progress=progress) for split in SPLITS}


def latencies(chats: Chats, tables: Tables, progress: Progress) -> list[tuple[str, Case, Outcome]]:
    """Figure 4: each data set and split over load, with x = 0 and by the table of the split."""
    named = [
        (name, Case(f"{split[0]}P_{split[1]}D", scripts, qps, later, count=len(scripts)))
        for name, scripts in chats.items()
        for split in SPLITS
        for qps in CHAT_QPS
        for later in (LaterTurns(0.0), LaterTurns(table=tables[split], qps=qps))
    ]
    found = _run([case for _, case in named], progress)
    return [(name, case, simulated) for (name, _), (case, simulated) in zip(named, found, strict=True)]


def trade_off(chats: Chats, table: PpdTable, progress: Progress) -> list[tuple[str, Case, Outcome]]:
    """Figure 5: x from 0 to 1, and the table under each weight of TPOT."""
    named = [(f"x = {ratio:g}", LaterTurns(ratio)) for ratio in RATIOS]
    named += [(f"w_tpot = {weight:g}", LaterTurns(table=_weighed(table, weight), qps=HEAVY_QPS)) for weight in WEIGHTS]
    scripts = heavy(chats)
    found = _run([Case("1P_3D", scripts, HEAVY_QPS, later, count=NUM_CHATS) for _, later in named], progress)
    return [(name, case, simulated) for (name, _), (case, simulated) in zip(named, found, strict=True)]


def _weighed(table: PpdTable, tpot_weight: float) -> PpdTable:
    return PpdTable(table.entries, ttft_weight=1.0, tpot_weight=tpot_weight)


def _run(cases: list[Case], progress: Progress) -> list[tuple[Case, Outcome]]:
    return list(zip(cases, on_all_cores(outcome, cases, progress), strict=True))
