"""`python -m benchmarks.solver`: every figure that `prfaas-solve` must hold, its bar and its baseline, as JSON."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.solver.grid import grid_search
from benchmarks.solver.large import write_deployment, write_trace
from benchmarks.solver.paper import TABLE_3_TOKENS, TABLE_6, sizing_claims
from benchmarks.solver.paper_form import STEP_TOKENS, table_6
from benchmarks.solver.roofline_fit import errors
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.cost.roofline import BAND
from prfaas.model.planning.planner import best_plan, homogeneous, naive
from prfaas.model.planning.single_pd import SinglePd
from prfaas.solve.files import catalog
from prfaas.solve.files.deployment_file import read_deployment
from prfaas.solve.files.traces import parse_spec
from prfaas.solve.study import study

RESULT = Path(__file__).parents[1] / "results" / "solver.json"
_REPEATS = 15


@dataclass(frozen=True)
class Figure:
    """One measurement: what it must be, and what the obvious way gives in the same run."""

    name: str
    figure: Any
    bar: str
    holds: bool
    baseline: Any = None


def main() -> int:
    """Measure, print, write; 1 when a bar is missed."""
    figures = [figure for part in (_table_6, _optimality, _sizing, _roofline, _speed, _large) for figure in part()]
    for figure in figures:
        print(f"{'holds ' if figure.holds else 'MISSES'}  {figure.name}: {figure.figure}  (bar: {figure.bar})")
        if figure.baseline is not None:
            print(f"        baseline: {figure.baseline}")
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps([asdict(figure) for figure in figures], indent=1, default=float) + "\n")
    return 0 if all(figure.holds for figure in figures) else 1


def _case_study() -> tuple[Any, Any]:
    deployment, written = read_deployment(catalog.deployment_path(catalog.CASE_STUDY))
    return deployment, parse_spec(written.trace)


def _table_6() -> Iterator[Figure]:
    found = {each["name"]: each for each in table_6()}
    bars = {"egress_gbps": 0.07, "threshold_tokens": 0.005}
    errors = {
        f"{name}.{field}": found[name][field] / printed - 1
        for name, fields in TABLE_6.items()
        for field, printed in fields.items()
    }
    cells = {name: error for name, error in errors.items() if name.split(".")[1] not in bars}
    worst = max(cells, key=lambda name: abs(cells[name]))
    yield Figure("Table 6, worst cell", f"{worst} {cells[worst]:+.2%}", "within 1 %", abs(cells[worst]) <= 0.01)
    for field, bar in bars.items():
        error = errors[f"prfaas-pd.{field}"]
        value = round(found["prfaas-pd"][field], 2)
        yield Figure(f"Table 6, {field}", f"{value} ({error:+.2%})", f"within {bar:.1%}", abs(error) <= bar)


def _optimality() -> Iterator[Figure]:
    deployment, workload = _case_study()
    loads = LoadModel(deployment, workload)
    plan = SinglePd(loads).plan()
    every = grid_search(loads, step_tokens=1)
    yield Figure(
        "exact plan over brute force at every token and split",
        plan.system_throughput / every.system_throughput - 1,
        "at least 0",
        plan.system_throughput >= every.system_throughput * (1 - 1e-12),
        f"{every.num_points} points: {every.system_throughput:.6f} req/s at t = {every.threshold_tokens}",
    )
    gap = study(deployment, workload).gap
    yield Figure("gap to the bound, whole instances", gap, "at most 0.1 %", 0 <= gap <= 1e-3)


def _sizing() -> Iterator[Figure]:
    for claim in sizing_claims():
        holds = claim.computed < claim.printed if claim.name.endswith("below") else abs(claim.error) < 0.03
        yield Figure(claim.name, f"{claim.computed:.4g} {claim.unit}", f"{claim.printed:g} as printed", holds)
    independent, implied = (
        catalog.find_profile(name).prefill for name in ("h200-qwen3-235b-aiconfigurator", "h200-qwen3-235b")
    )
    errors = [f"{independent.seconds(n) / implied.seconds(n) - 1:+.0%}" for n in TABLE_3_TOKENS]
    yield Figure("AIConfigurator's prefill against Table 3's, Qwen3-235B at 1K, 8K, 32K, 128K", errors, "stated", True)


def _roofline() -> Iterator[Figure]:
    low, high = BAND
    for found in errors():
        shown = [[f"{error:+.0%}" for error in part] for part in (found.fitted, found.left_out)]
        holds = all(low <= 1 / (1 + error) <= high for error in (*found.fitted, *found.left_out))
        yield Figure(f"roofline, {found.model}: errors, and left out of the fit", shown, f"{low} to {high}", holds)


def _cpu_seconds(run: Callable[[], object]) -> dict[str, float]:
    """Median, least and greatest CPU time of a call, warmed up."""
    run()
    times = []
    for _ in range(_REPEATS):
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


def _speed() -> Iterator[Figure]:
    deployment, workload = _case_study()
    three = (deployment, homogeneous(deployment), naive(deployment))
    grid = _cpu_seconds(lambda: grid_search(LoadModel(deployment, workload), step_tokens=STEP_TOKENS))
    found = grid_search(LoadModel(deployment, workload), step_tokens=STEP_TOKENS)
    plans = _cpu_seconds(lambda: [best_plan(made, workload) for made in three])
    baseline = f"grid of {found.num_points} points, one deployment: median {grid['median']:.3f} s, t = {found.threshold_tokens}"
    yield Figure("three plans, CPU seconds after imports", plans, "below 0.1", plans["median"] < 0.1, baseline)
    whole = _cpu_seconds(lambda: study(deployment, workload))
    yield Figure(
        "three plans and bounds, CPU seconds",
        whole,
        "below 0.1",
        whole["median"] < 0.1,
        baseline,
    )
    walls = sorted(_wall_seconds("--trace", "lognormal") for _ in range(5))
    yield Figure(
        "whole command, wall seconds",
        {"median": walls[2], "min": walls[0], "max": walls[4]},
        "below 1.5",
        walls[2] < 1.5,
    )


def _wall_seconds(*arguments: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "prfaas.cli.solve", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _large() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_trace(folder)
        for with_links in (False, True):
            file = write_deployment(folder, with_links=with_links)
            walls = sorted(_wall_seconds("--deployment", str(file)) for _ in range(3))
            kind = "a link for each pair" if with_links else "an egress each"
            yield Figure(
                f"10 clusters × 1,000 instances, {kind}, 100,000 lines, wall seconds",
                {"median": walls[1], "min": walls[0], "max": walls[2]},
                "below 5",
                walls[1] < 5,
            )


if __name__ == "__main__":
    sys.exit(main())
