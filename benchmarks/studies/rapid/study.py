"""RAPID-Serve's printed ratios beside the twin's: chunks, transfer, gains over chunked batching and disaggregation.

The paper's averages are over its loads too, so each gain here is the mean over `LOADS`, shares of what the shared node
sustains. Mixtral is not compared with disaggregation, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from benchmarks.studies.rapid.experiment import (
    FREE_TRANSFER,
    SYSTEMS,
    TRACES,
    Setting,
    Trace,
    run,
    saturated_throughput,
)
from benchmarks.studies.rapid.hardware import LLAMA_70B, MIXTRAL_8X7B, Efficiency
from prfaas.model.cost.colocation import SharingSpeeds
from prfaas.sim.command import Progress, on_all_cores
from prfaas.sim.model.sharing import modelled_speeds
from prfaas.sim.summary import Summary

SETTINGS = {"Llama-70B": Setting(LLAMA_70B, 0.1), "Mixtral 8x7B": Setting(MIXTRAL_8X7B, 0.05)}
ASSUMED = modelled_speeds()
EFFICIENCY = Efficiency()
OTHER_SPEEDS = (0.7, 0.8)
_PAIRS = [(model, trace) for model in SETTINGS for trace in TRACES]
LOADS = tuple(quarter / 4 for quarter in range(1, 9))
# Seconds of both overheads, and greatest loads, of `grid`.
OVERHEADS = (0.001, 0.003, 0.005, 0.011, 0.02)
LOAD_RANGES = (1.0, 1.5, 2.0)
CHUNKS = ("chunked-512", "chunked-1024", "chunked-2048")
# A baseline whose goodput is below this share of the arrivals has collapsed.
NEAR_ZERO = 0.05
# Seconds of arrivals in a run, and bounds of their number.
_RUN_SECONDS, _LEAST, _MOST = 90.0, 200, 2000
_ALMOST_IDLE = 0.1


@dataclass(frozen=True)
class Cell:
    """One model and trace: runs of each system at each load, what each sustains, and what a free transfer would give."""

    model: str
    trace: Trace
    sustained: dict[str, float]
    runs: dict[str, list[Summary]]
    transfer_throughput: float
    transfer_ttft: float

    def gain(self, baseline: str, over: str = "rapid", *, up_to: float = LOADS[-1]) -> float:
        """Mean over the loads, at most `up_to`, of the throughput of `over` against the baseline's."""
        count = sum(load <= up_to for load in LOADS)
        pairs = zip(self.runs[over][:count], self.runs[baseline][:count], strict=True)
        return fmean(measured.throughput / printed.throughput for measured, printed in pairs)

    def itl_ratio(self, system: str, baseline: str) -> float:
        """Mean over the loads of the mean ITL against the baseline's."""
        pairs = zip(self.runs[system], self.runs[baseline], strict=True)
        return fmean(measured.itl.mean / printed.itl.mean for measured, printed in pairs)

    def goodput_gain(self, baseline: str) -> float | None:
        """Return the ratio of the summed goodputs; None where the baseline's is near zero and the ratio means nothing."""
        measured, printed = (sum(result.goodput for result in self.runs[name]) for name in ("rapid", baseline))
        arrivals = sum(result.arrivals for result in self.runs[baseline])
        return measured / printed if printed > NEAR_ZERO * arrivals else None


def cell(named: tuple[str, Trace], speeds: SharingSpeeds = ASSUMED, efficiency: Efficiency = EFFICIENCY) -> Cell:
    """Everything of one model and trace."""
    model, trace = named
    setting = replace(SETTINGS[model], speeds=speeds, efficiency=efficiency)
    free = replace(setting, transfer=FREE_TRANSFER)
    sustained = {name: saturated_throughput(name, setting, trace) for name in SYSTEMS}
    most = sustained["rapid"]
    runs = {
        name: [run(name, setting, trace, rate=load * most, count=_count(load * most)) for load in LOADS]
        for name in SYSTEMS
    }
    idle = [
        run("disaggregated", hardware, trace, rate=_ALMOST_IDLE * most, count=_LEAST).ttft.mean
        for hardware in (setting, free)
    ]
    throughput = saturated_throughput("disaggregated", free, trace) / sustained["disaggregated"]
    return Cell(model, trace, sustained, runs, throughput, idle[0] / idle[1])


def _count(rate: float) -> int:
    return int(min(max(_RUN_SECONDS * rate, _LEAST), _MOST))


@dataclass(frozen=True)
class Claim:
    """A printed ratio, ours, and how far apart they may be."""

    name: str
    printed: float
    found: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return abs(self.found - self.printed) <= self.tolerance


def cells(progress: Progress) -> list[Cell]:
    """Return all models and traces, on all cores."""
    return on_all_cores(cell, _PAIRS, progress)


def sensitivity(progress: Progress) -> dict[float, list[Claim]]:
    """Return the claims under other speeds of an over-allocated prefill than the assumed one, which nothing printed fixes."""
    found = {}
    for speed in OTHER_SPEEDS:
        varied_cell = partial(cell, speeds=replace(ASSUMED, overallocated_prefill=speed))
        found[speed] = claims(on_all_cores(varied_cell, _PAIRS, progress))
    return found


@dataclass(frozen=True)
class GridPoint:
    """Both predicted gains with these overheads of an iteration and a step, over loads up to `up_to`."""

    overhead_seconds: float
    up_to: float
    over_chunked: float
    over_disaggregated: float


def grid(progress: Progress) -> list[GridPoint]:
    """Return the gains over a grid of overheads and load ranges, neither of which the paper prints."""
    found = []
    for overhead in OVERHEADS:
        efficiency = Efficiency(iteration_seconds=overhead, step_seconds=overhead)
        made = on_all_cores(partial(cell, efficiency=efficiency), _PAIRS, progress)
        large = [result for result in made if result.model == "Llama-70B"]
        for up_to in LOAD_RANGES:
            chunked = fmean(result.gain(chunk, up_to=up_to) for result in made for chunk in CHUNKS)
            disaggregated = fmean(result.gain("disaggregated", up_to=up_to) for result in large)
            found.append(GridPoint(overhead, up_to, chunked, disaggregated))
    return found


def claims(found: Sequence[Cell]) -> list[Claim]:
    """R1, R6 and R7 of the paper. Chunk law and transfer are what the constants were set by, the gains are predicted."""
    large = [result for result in found if result.model == "Llama-70B"]
    return [
        Claim(
            "chunks of 1K against 512, throughput",
            1.2,
            fmean(result.gain(CHUNKS[0], CHUNKS[1]) for result in large),
            0.05,
        ),
        Claim(
            "chunks of 1K against 512, ITL",
            1.3,
            fmean(result.itl_ratio(CHUNKS[1], CHUNKS[0]) for result in large),
            0.05,
        ),
        Claim("free transfer, throughput", 1.4, fmean(result.transfer_throughput for result in large), 0.05),
        Claim("transfer, TTFT", 1.9, fmean(result.transfer_ttft for result in large), 0.05),
        Claim(
            "over chunked batching, throughput",
            1.7,
            fmean(result.gain(chunk) for result in found for chunk in CHUNKS),
            0.3,
        ),
        Claim("over disaggregation, throughput", 1.5, fmean(result.gain("disaggregated") for result in large), 0.3),
    ]
