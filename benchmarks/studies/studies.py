"""Studies that `prfaas-sim --study` runs: each makes tables of many runs, on all cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from benchmarks.studies import overlap_study, search_study
from benchmarks.studies.ppd import experiment as ppd
from benchmarks.studies.ppd import figures
from benchmarks.studies.ppd.deployments import GRID
from benchmarks.studies.rapid import study as rapid
from prfaas.ppd.table import FIRST_TURNS, QPS, SECOND_TURNS
from prfaas.scheduler.ppd import ContextClass, WorkloadType
from prfaas.sim.command import Progress, on_all_cores
from prfaas.sim.run import simulate
from prfaas.sim.scenario import VARIANTS, Scenario
from prfaas.sim.workload.conversations import recorded

LOADS = ("50%", "80%", "90%", "95%")
NUM_REQUESTS = 60_000
SAME_LOAD = "1.9req/s"  # 94 % of what the homogeneous deployment sustains
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
    """TTFT of the case study's three deployments, each at shares of its own exact capacity, then all at `SAME_LOAD`."""
    scenarios = [Scenario(variant=variant, load=load, requests=NUM_REQUESTS) for load in LOADS for variant in VARIANTS]
    runs = on_all_cores(simulate, scenarios, progress)
    rows = tuple(
        (run.scenario.load, run.scenario.variant, run.rate, run.summary.ttft.mean, run.summary.ttft.quantile(0.9))
        for run in runs
    )
    columns = ("load", "deployment", "req/s", "mean (s)", "P90 (s)")
    return [Table("TTFT with queues", columns, rows), _same_arrivals(progress)]


def _same_arrivals(progress: Progress) -> Table:
    scenarios = [Scenario(variant=variant, load=SAME_LOAD, requests=NUM_REQUESTS) for variant in VARIANTS]
    runs = on_all_cores(simulate, scenarios, progress)
    rows = tuple(
        (run.scenario.variant, run.summary.ttft.mean, run.summary.ttft.quantile(0.9), run.setup.capacity)
        for run in runs
    )
    return Table("TTFT at the same arrivals", ("deployment", "mean (s)", "P90 (s)", "capacity (req/s)"), rows)


def rapid_serve(progress: Progress) -> list[Table]:
    """RAPID-Serve's ratios, printed and simulated."""
    cells = rapid.cells(progress)
    claims = tuple((claim.name, claim.printed, claim.found, claim.tolerance) for claim in rapid.claims(cells))
    baselines = (*rapid.CHUNKS, "disaggregated")
    sustained: Rows = tuple((cell.model, cell.trace.name, *cell.sustained.values()) for cell in cells)
    gains: Rows = tuple((cell.model, cell.trace.name, *(cell.gain(name) for name in baselines)) for cell in cells)
    goodput: Rows = tuple(
        (cell.model, cell.trace.name, *(cell.goodput_gain(name) or "baseline near 0" for name in baselines))
        for cell in cells
    )
    loads: Rows = tuple(
        (cell.model, cell.trace.name, system, run.arrivals, run.throughput, run.goodput, run.itl.mean)
        for cell in cells
        for system, runs in cell.runs.items()
        for run in runs
    )
    where = ("model", "trace")
    return [
        Table("RAPID-Serve's ratios", ("ratio", "printed", "twin", "may differ by"), claims),
        Table("Sustained (req/s)", (*where, *cells[0].sustained), sustained),
        Table("Mean throughput gain of the shared node over", (*where, *baselines), gains),
        Table("Goodput gain of the shared node over", (*where, *baselines), goodput),
        Table("Over the load", (*where, "system", "asked", "served", "goodput", "ITL (s)"), loads),
    ]


def rapid_sensitivity(progress: Progress) -> list[Table]:
    """RAPID-Serve's gains under other speeds of an over-allocated prefill."""
    rows: Rows = tuple(
        (cell.name, speed, cell.found, "yes" if cell.holds else "no")
        for speed, found in rapid.sensitivity(progress).items()
        for cell in found[-2:]
    )
    columns = ("gain", "over-allocated prefill", "twin", "within the band")
    return [Table("By the speed of an over-allocated prefill", columns, rows)]


def rapid_grid(progress: Progress) -> list[Table]:
    """RAPID-Serve's gains over chosen overheads and load ranges: how far they are calibration."""
    rows: Rows = tuple(
        (1000 * point.overhead_seconds, point.up_to, point.over_chunked, point.over_disaggregated)
        for point in rapid.grid(progress)
    )
    columns = ("overhead (ms)", "loads up to", "over chunked batching", "over disaggregation")
    return [Table("By overhead and load range", columns, rows)]


def overlap(progress: Progress) -> list[Table]:
    """Return the gain by shared PD instances in a homogeneous and in a PrfaaS-PD deployment."""
    found = {
        (outcome.case.variant, outcome.case.tokens_per_second, outcome.case.shared): outcome
        for outcome in overlap_study.outcomes(progress)
    }
    rows: list[Row] = []
    for (variant, rate, shared), cell in found.items():
        if shared:
            apart = found[variant, rate, False]
            gain = (cell.planned / apart.planned - 1, cell.served / apart.served - 1)
            rows.append((variant, rate, apart.served, cell.served, *gain, cell.case.threshold_ratio))
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
    """Return how many cells of 1P_3D's table stay local as TPOT weighs more."""
    table = ppd.ppd_table(1, 3, progress=progress)
    rows = []
    for weight in TPOT_WEIGHTS:
        scores = [entry.score(ttft_weight=1.0, tpot_weight=weight) for entry in table.entries]
        rows.append((weight, sum(score > 0 for score in scores) / len(scores)))
    return [Table("1P_3D, w_ttft = 1", ("w_tpot", "local share of cells"), tuple(rows))]


_LATENCY_COLUMNS = (
    "conversations", "configuration", "QPS", "later turns", "latency (s)", "P50", "P90", "over 30 s", "preempted", "local"
)  # fmt: skip


def ppd_figures(progress: Progress, chats: figures.Chats | None = None) -> list[Table]:
    """Figures 1, 4 and 5 of PPD's paper: frontiers, latency over load, what weighing TPOT trades.

    The conversations of 4 and 5 are drawn, where none are given, from what the authors' measurements show of theirs.
    """
    chats = chats or figures.drawn()
    frontier: Rows = tuple(
        (
            f"{case.qps:g} conversations/s",
            case.configuration,
            "D-local capable" if figures.prefills_later_turns(case.configuration) else "baseline",
            found.tokens_per_second,
            found.ttft_p99_seconds,
        )
        for case, found in figures.frontiers(progress)
    )
    tables = figures.tables_of_splits(progress)
    latency: Rows = tuple(
        (
            name,
            case.configuration,
            case.qps,
            _mode(case),
            *_latency(found),
            found.num_late,
            found.num_preemptions,
            found.local_ratio,
        )
        for name, case, found in figures.latencies(chats, tables, progress)
    )
    trade: Rows = tuple(
        (name, 1000 * found.later_ttft_seconds, 1000 * found.later_tpot_seconds, found.local_ratio)
        for name, _, found in figures.trade_off(chats, tables[1, 3], progress)
    )
    return [
        Table("PPD, Figure 1", ("load", "configuration", "kind", "tokens/s", "P99 TTFT (s)"), frontier),
        Table("PPD, Figure 4", _LATENCY_COLUMNS, latency),
        Table("PPD, Figure 5", ("later turns", "TTFT (ms)", "TPOT (ms)", "local"), trade),
    ]


def _latency(found: figures.Outcome) -> tuple[float, float, float]:
    return found.latency.mean, found.latency.quantile(0.5), found.latency.quantile(0.9)


def _mode(case: figures.Case) -> str:
    return "by the table" if case.later and case.later.table else "x = 0"


def searches(progress: Progress) -> list[Table]:
    """Figure 5 of PrfaaS: capacity over the split and over t, solved and simulated."""
    splits, thresholds = search_study.search(progress)
    by_split: Rows = tuple((split.num_prefill, split.solved, split.served) for split in splits)
    by_threshold: Rows = tuple(
        (threshold.threshold_tokens, threshold.solved, threshold.served) for threshold in thresholds
    )
    figures_of = ("solver (req/s)", "twin (req/s)")
    return [
        Table("t = 19.4K, N_p of 8", ("N_p", *figures_of), by_split),
        Table("N_p = 3, t", ("t (tokens)", *figures_of), by_threshold),
    ]


def ppd_figures_of(path: Path) -> Study:
    """Return the same with the conversations of a file.

    Raises:
        ConfigError: the file cannot be used.
    """
    return partial(ppd_figures, chats={path.stem: figures.multi_turn(recorded(path))})


Study = Callable[[Progress], list[Table]]
STUDIES: Mapping[str, Study] = MappingProxyType({
    "queueing": queueing,
    "rapid": rapid_serve,
    "rapid-sensitivity": rapid_sensitivity,
    "rapid-grid": rapid_grid,
    "overlap": overlap,
    "search": searches,
    "ppd": ppd_grid,
    "ppd-figures": ppd_figures,
    "ppd-weights": ppd_weights,
})  # fmt: skip


def shown(tables: Sequence[Table]) -> str:
    """Return all tables of a study, for a screen."""
    return "\n".join(render(table) for table in tables)
