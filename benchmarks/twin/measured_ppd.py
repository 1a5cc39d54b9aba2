"""Comparison of the twin with the measurements of PPD's authors; benchmarks/twin/README.md describes the files."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev

from benchmarks.studies.ppd.experiment import Effort, TurnFigures, measure, workload
from benchmarks.studies.ppd.interference import PrefillKind, slowdown_ratio, undisturbed_seconds
from benchmarks.studies.ppd.model import TURN_HARNESS
from prfaas.ppd.table import FIRST_TURNS, SECOND_TURNS
from prfaas.scheduler.ppd import ContextClass, WorkloadType
from prfaas.sim.command import on_all_cores
from prfaas.sim.workload.conversations import Turn

# Environment variable with the folder of the measurements.
FOLDER = "PPD_MEASURED"
CONFIGURATIONS = ("4R", "1P_3D", "1P_3pD", "2P_2D", "2P_2pD", "3P_1D", "3P_1pD")
CALIBRATED = frozenset({
    "large_big_paste", "large_long_gen", "large_mid_paste", "large_small_bal", "large_very_long_gen",
    "small_huge_paste", "small_mid_bal", "small_short_gen", "small_tiny",
})  # fmt: skip
KINDS: tuple[PrefillKind, ...] = ("full", "append")
Key = tuple[str, ContextClass, WorkloadType, float]
Latency = tuple[float, float]  # turn-2 TTFT and TPOT in seconds


class NotThere(Exception):
    """Nobody has put the measurements on this machine."""


def measured_rows(name: str) -> Iterator[dict[str, str]]:
    """Yield the rows of one of the files.

    Raises:
        NotThere: there is no such file.
    """
    file_path = Path(os.environ.get(FOLDER, "")) / name
    if not file_path.is_file():
        raise NotThere(f"no {file_path}; {FOLDER} names the folder of the measurements (benchmarks/twin/README.md)")
    with file_path.open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def held_out() -> dict[Key, Latency]:
    """Runs of the workloads that nothing was fitted to, failed ones left out."""
    cells: list[tuple[ContextClass, WorkloadType]] = [
        (context, kind) for context in FIRST_TURNS for kind in SECOND_TURNS
    ]
    named = {f"{context}_{kind}": (context, kind) for context, kind in cells}
    found = {}
    for row in measured_rows("grid3060.csv"):
        latency = float(row["turn2_avg_ttft_ms"] or 0) / 1000, float(row["turn2_avg_tpot_ms"] or 0) / 1000
        worked = float(row["success_rate"] or 0) >= 95 and min(latency) > 0
        if worked and row["config"] in CONFIGURATIONS and row["workload"] not in CALIBRATED:
            found[row["config"], *named[row["workload"]], float(row["qps"])] = latency
    return found


def _simulated(key: Key) -> TurnFigures:
    configuration, context, kind, qps = key
    return measure(configuration, workload(context, kind), qps=qps, effort=Effort(seeds=(1,)))[1]


def simulated(keys: Sequence[Key]) -> dict[Key, TurnFigures]:
    """Return the same runs in the twin."""
    return dict(zip(keys, on_all_cores(_simulated, keys, lambda *_: None), strict=True))


def errors(known: dict[Key, Latency], found: dict[Key, TurnFigures]) -> dict[str, tuple[int, float, float]]:
    """Return the number of runs and the median relative errors of TTFT and TPOT, by configuration and for all."""
    each = {}
    for name in (*CONFIGURATIONS, "all"):
        keys = [key for key in known if name in (key[0], "all")]
        ttft = median(abs(found[key].ttft_seconds / known[key][0] - 1) for key in keys)
        each[name] = len(keys), ttft, median(abs(found[key].tpot_seconds / known[key][1] - 1) for key in keys)
    return each


def right_signs(known: dict[Key, Latency], found: dict[Key, TurnFigures]) -> tuple[int, int]:
    """In how many cells local prefill gains TTFT in the twin where it did, and of how many."""
    pairs = [(key, (key[0].replace("D", "pD"), *key[1:])) for key in known if key[0].endswith(("P_3D", "P_2D", "P_1D"))]
    both = [(apart, local) for apart, local in pairs if local in known]
    right = sum(
        (found[apart].ttft_seconds > found[local].ttft_seconds) == (known[apart][0] > known[local][0])
        for apart, local in both
    )
    return right, len(both)


def turn_errors() -> list[float]:
    """Relative errors of each later turn's TTFT in the runs of up to 16 turns."""
    known: dict[tuple[str, int], dict[int, float]] = {}
    for row in measured_rows("turn-scaling.csv"):
        if row["config"] in CONFIGURATIONS:
            known.setdefault((row["config"], int(row["num_turns"])), {})[int(row["turn"])] = float(row["avg_ttft_ms"])
    found = []
    for (name, num_turns), turns in known.items():
        # The measured runs had the same rate.
        conversations_per_second = 3.0 / num_turns
        effort = Effort(harness=TURN_HARNESS, seeds=(1, 2, 3))
        figures = measure(name, [Turn(128, 128)] * num_turns, qps=conversations_per_second, effort=effort)
        found += [1000 * figures[turn - 1].ttft_seconds / ttft - 1 for turn, ttft in turns.items() if turn > 1]
    return found


@dataclass(frozen=True)
class Slowdown:
    """One cell of the interference runs: by what part of itself TPOT grew, measured and by the law.

    `measured` is against the measured TPOT without prefills, `against_profile` against the fitted one
    (`undisturbed_seconds`); `error` and `error_against_profile` are their standard errors by the five repeats.
    """

    law: float
    measured: float
    error: float
    against_profile: float
    error_against_profile: float


def slowdowns(kind: PrefillKind) -> list[Slowdown]:
    """Return errors at odd tens of decoding requests, 10 to 190, which no constant was fitted to, with 1, 2 and 4 prefills."""
    repeats: dict[tuple[int, int, str], list[float]] = {}
    for row in measured_rows("interference-core.csv"):
        key = int(row["decode_count"]), int(row["prefill_count"]), row["prefill_type"]
        repeats.setdefault(key, []).append(float(row["decode_avg_tpot_ms"] or 0) / 1000)
    return [
        _slowdown(repeats[batch, count, kind], repeats[batch, 0, ""], (batch, count, kind))
        for batch in range(10, 200, 20)
        for count in (1, 2, 4)
    ]


def _slowdown(slowed: list[float], alone: list[float], where: tuple[int, int, PrefillKind]) -> Slowdown:
    ratio, profile = fmean(slowed) / fmean(alone), undisturbed_seconds(where[0])
    error = ratio * math.hypot(*(stdev(steps) / fmean(steps) / math.sqrt(len(steps)) for steps in (slowed, alone)))
    error_against_profile = stdev(slowed) / math.sqrt(len(slowed)) / profile
    return Slowdown(slowdown_ratio(*where), ratio - 1, error, fmean(slowed) / profile - 1, error_against_profile)


def expected_within(errors: Iterable[float], distance: float) -> float:
    """In how many cells a law that knew each true slowdown would be expected this near the measured one."""
    return math.fsum(math.erf(distance / (error * math.sqrt(2))) for error in errors)
