"""Studies that `prfaas-sim --study` runs: each makes tables of many runs, on all cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from types import MappingProxyType
from typing import Any

from prfaas.ppd.workloads import FIRST_TURNS, QPS, SECOND_TURNS
from prfaas.scheduler.ppd import ContextClass, WorkloadType
from prfaas.sim import overlap_study
from prfaas.sim.parallel import Progress, on_all_cores
from prfaas.sim.ppd import experiment as ppd
from prfaas.sim.ppd.deployments import GRID
from prfaas.sim.rapid import study as rapid
from prfaas.sim.run import simulate
from prfaas.sim.scenario import VARIANTS, Scenario

LOADS = ("50%", "80%", "90%", "95%")
TPOT_WEIGHTS = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 10.0)

Row = tuple[str | float, ...]
Rows = tuple[Row, ...]


@dataclass(frozen=True)
class Table:
    """Named columns and rows of texts and numbers."""

    title: str
    columns: tuple[str, ...]
    rows: Rows

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def render(table: Table) -> str:
    """For a screen."""
    rows = [table.columns, *(tuple(_shown(cell) for cell in row) for row in table.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows)
    return f"{table.title}\n" + "\n".join(lines) + "\n"


def _shown(cell: str | float) -> str:
    return cell if isinstance(cell, str) else f"{cell:.3g}"


def queueing(progress: Progress) -> list[Table]:
    """TTFT of the case study's three deployments, each at shares of its own exact capacity."""
    scenarios = [Scenario(variant=variant, load=load, requests=60_000) for load in LOADS for variant in VARIANTS]
    runs = on_all_cores(simulate, scenarios, progress)
    rows = tuple(
        (run.scenario.load, run.scenario.variant, run.rate, run.summary.ttft.mean, run.summary.ttft.quantile(0.9))
        for run in runs
    )
    return [Table("TTFT with queues", ("load", "deployment", "req/s", "mean (s)", "P90 (s)"), rows)]


def rapid_serve(progress: Progress) -> list[Table]:
    """RAPID-Serve's ratios, printed and simulated."""
    cells = rapid.cells(progress)
    claims = tuple((one.name, one.printed, one.found, one.tolerance) for one in rapid.claims(cells))
    baselines = (*rapid.CHUNKS, "disaggregated")
    sustained: Rows = tuple((one.model, one.trace.name, *one.sustained.values()) for one in cells)
    gains: Rows = tuple((one.model, one.trace.name, *(one.gain(name) for name in baselines)) for one in cells)
    goodput: Rows = tuple(
        (one.model, one.trace.name, *(one.goodput_gain(name) or "baseline near 0" for name in baselines))
        for one in cells
    )
    where = ("model", "trace")
    return [
        Table("RAPID-Serve's ratios", ("ratio", "printed", "twin", "may differ by"), claims),
        Table("Sustained (req/s)", (*where, *cells[0].sustained), sustained),
        Table("Mean throughput gain of the shared node over", (*where, *baselines), gains),
        Table("Goodput gain of the shared node over", (*where, *baselines), goodput),
    ]


def overlap(progress: Progress) -> list[Table]:
    """What PD instances that share their time are worth to a homogeneous and to a PrfaaS-PD deployment."""
    found = {
        (one.case.variant, one.case.tokens_per_second, one.case.shared): one for one in overlap_study.outcomes(progress)
    }
    rows: list[Row] = []
    for (variant, rate, shared), one in found.items():
        if shared:
            apart = found[variant, rate, False]
            gain = (one.planned / apart.planned - 1, one.served / apart.served - 1)
            rows.append((variant, rate, apart.served, one.served, *gain, one.case.threshold_ratio))
    columns = ("deployment", "tok/s", "apart (req/s)", "shared (req/s)", "gain planned", "gain served", "t / planned t")
    return [Table("PD instances that prefill and decode at once", columns, tuple(rows))]


GridCell = tuple[str, ContextClass, WorkloadType, float]


def _grid_cell(cell: GridCell) -> ppd.TurnFigures:
    configuration, context, kind, qps = cell
    effort = ppd.Effort(seeds=(1,))
    return ppd.measure(configuration, ppd.workload(context, kind), qps=qps, effort=effort)[1]


def ppd_grid(progress: Progress) -> list[Table]:
    """PPD's 17 configurations × 18 workloads × 10 rates: means, and in how many of the 180 cells each is the best."""
    cells = [(context, kind, qps) for context in FIRST_TURNS for kind in SECOND_TURNS for qps in QPS]
    asked: list[GridCell] = [(name, *cell) for name in GRID for cell in cells]
    figures = dict(zip(asked, on_all_cores(_grid_cell, asked, progress), strict=True))
    best_ttft = Counter(min(GRID, key=lambda name: figures[name, *cell].ttft_seconds) for cell in cells)
    best_tpot = Counter(min(GRID, key=lambda name: figures[name, *cell].tpot_seconds) for cell in cells)
    rows = tuple(
        (
            name,
            1000 * fmean(figures[name, *cell].ttft_seconds for cell in cells),
            1000 * fmean(figures[name, *cell].tpot_seconds for cell in cells),
            best_ttft[name],
            best_tpot[name],
        )
        for name in GRID
    )
    columns = ("configuration", "turn-2 TTFT (ms)", "TPOT (ms)", "best TTFT", "best TPOT")
    return [Table("PPD's grid, simulated", columns, rows)]


def ppd_weights(progress: Progress) -> list[Table]:
    """How many cells of 1P_3D's table stay local as TPOT weighs more."""
    table = ppd.ppd_table(1, 3, progress=progress)
    rows = []
    for weight in TPOT_WEIGHTS:
        scores = [one.score(ttft_weight=1.0, tpot_weight=weight) for one in table.entries]
        rows.append((weight, sum(score > 0 for score in scores) / len(scores)))
    return [Table("1P_3D, w_ttft = 1", ("w_tpot", "local share of cells"), tuple(rows))]


Study = Callable[[Progress], list[Table]]
STUDIES: Mapping[str, Study] = MappingProxyType({
    "queueing": queueing,
    "rapid": rapid_serve,
    "overlap": overlap,
    "ppd": ppd_grid,
    "ppd-weights": ppd_weights,
})  # fmt: skip


def shown(tables: Sequence[Table]) -> str:
    """All tables of a study, for a screen."""
    return "\n".join(render(table) for table in tables)
