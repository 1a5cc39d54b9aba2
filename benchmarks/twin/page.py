"""Tables and plots of `benchmarks/twin/README.md`, made from the results. Two comments with its name surround each table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies import study_plots
from benchmarks.studies.studies import Rows, Table
from benchmarks.twin import constants

_ROOT = Path(__file__).resolve().parents[2]
RESULT = _ROOT / "benchmarks" / "results" / "twin.json"
PAGE = _ROOT / "benchmarks" / "twin" / "README.md"
IMAGES = _ROOT / "benchmarks" / "images"
_PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
Results = Mapping[str, Any]
Cells = Sequence[Any]


def with_tables(page: str, results: Results) -> str:
    """The page with each of its tables as the results and the constants are; one that the results lack stays as it is."""

    def written(found: re.Match[str]) -> str:
        if found[2] in CONSTANTS:
            rows = CONSTANTS[found[2]]()
            return f"{found[1]}\n{_written(('constant', 'value', 'from'), list(rows))}\n{found[3]}"
        part, table = TABLES[found[2]]
        text = table(results) if part in results else ""
        return f"{found[1]}\n{text}\n{found[3]}" if text else found[0]

    return _PLACE.sub(written, page)


def draw(results: Results) -> None:
    """Draw the plots of all studies in the results into `IMAGES`."""
    for part, study in DRAWN.items():
        if part in results:
            tables = [
                Table(result["title"], tuple(result["columns"]), _tuples(result["rows"]))
                for result in results[part]["tables"]
            ]
            study_plots.write(study, tables, IMAGES)


def _tuples(rows: Sequence[Cells]) -> Rows:
    return tuple(tuple(row) for row in rows)


def _written(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Nothing where there are no rows."""
    if not rows:
        return ""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _rows(results: Results, part: str, title: str) -> list[Cells]:
    """None where the part was measured without what this table needs."""
    return [row for result in results[part]["tables"] if result["title"] == title for row in result["rows"]]


def _queueing(results: Results) -> str:
    """Return the three deployments per load in one row, with the gain of the first over the second."""
    by_load: dict[str, dict[str, Cells]] = {}
    for load, variant, *figures in _rows(results, "queueing", "TTFT with queues"):
        by_load.setdefault(load, {})[variant] = figures
    rows = []
    for load, table_rows in by_load.items():
        (_, mean, p90), (_, pd_mean, pd_p90) = table_rows["prfaas-pd"], table_rows["homogeneous-pd"]
        gains = f"{mean / pd_mean - 1:+.0%} / {p90 / pd_p90 - 1:+.0%}"
        rows.append([load, *(f"{mean:.2f} / {p90:.2f}" for _, mean, p90 in table_rows.values()), gains])
    columns = ("load", "PrfaaS-PD mean / P90 (s)", "homogeneous", "naive", "PrfaaS-PD against homogeneous")
    return _written(columns, rows)


def _same_arrivals(results: Results) -> str:
    found = _rows(results, "queueing", "TTFT at the same arrivals")
    worst = next(p90 for name, _, p90, _ in found if name == "homogeneous-pd")
    rows = [
        [name, f"{mean:.2f}", f"{p90:.2f}", f"{capacity:.2f}", f"{p90 / worst - 1:+.0%}"]
        for name, mean, p90, capacity in found
    ]
    columns = ("", "TTFT mean (s)", "P90 (s)", "exact capacity (req/s)", "P90 against homogeneous")
    return _written(columns, rows)


def _ppd(results: Results) -> str:
    rows = [
        [name, f"{runs:.0f}", f"{ttft:.1%}", f"{tpot:.1%}"]
        for name, runs, ttft, tpot in _rows(results, "ppd", "PPD held out")
    ]
    return _written(("", "runs", "TTFT, median error", "TPOT, median error"), rows)


def _ppd_latency(results: Results) -> str:
    """Return a row for each measured curve; failed runs are a dash."""
    curves: dict[tuple[str, str, str], dict[float, tuple[float, float]]] = {}
    for name, split, qps, mode, known, _, found, _ in _rows(results, "ppd_figures", "PPD, Figure 4, measured"):
        curves.setdefault((name, split, mode), {})[qps] = known, found
    # In conversations per second.
    rates = sorted({qps for curve in curves.values() for qps in curve})
    rows = [
        [*key, *(" / ".join(f"{value:.1f}" for value in curve[qps]) if qps in curve else "-" for qps in rates)]
        for key, curve in sorted(curves.items())
    ]
    return _written(("conversations", "", "later turns", *(f"{qps:g} a second" for qps in rates)), rows)


def _interference(results: Results) -> str:
    """Return the cells within 15 points beside those that a law without any error of its own would be expected to have."""
    rows = []
    for result in results["ppd"]["figures"]:
        if result["name"].startswith("PPD interference, "):
            against, (distance, within) = (
                result["name"].removeprefix("PPD interference, ").split(":")[0],
                result["figure"],
            )
            expected = result["peer"].split(": ")[1].split()[0]
            rows.append([against, f"{100 * distance:.0f} points", within, f"{expected} of 30"])
    columns = (
        "prefills, slowdown",
        "median distance",
        "cells within 15 points",
        "expected of a law that knew every true slowdown",
    )
    return _written(columns, rows)


def _rapid(results: Results) -> str:
    rows = [
        [name, f"{printed:g} ± {tolerance:g}", f"{found:.2f}"]
        for name, printed, found, tolerance in _rows(results, "rapid", "RAPID-Serve's ratios")
    ]
    return _written(("ratio", "printed", "twin"), rows)


def _rapid_sensitivity(results: Results) -> str:
    found = _rows(results, "rapid_sensitivity", "By the speed of an over-allocated prefill")
    rows = [[name, f"{speed:g}", f"{gain:.2f}", within] for name, speed, gain, within in found]
    return _written(("gain", "over-allocated prefill", "twin", "within the band"), rows)


def _overlap(results: Results) -> str:
    found = _rows(results, "overlap", "PD instances that prefill and decode at once")
    rows = [
        [name, f"{rate:g}", f"{apart:.2f}", f"{shared:.2f}", f"{planned:+.0%}", f"{served:+.0%}", f"{threshold:g}"]
        for name, rate, apart, shared, planned, served, threshold in found
    ]
    columns = (
        "", "tok/s asked", "apart (req/s)", "shared (req/s)", "gain planned", "gain in the twin", "t / planned t"
    )  # fmt: skip
    return _written(columns, rows)


CONSTANTS: Mapping[str, Callable[[], Iterable[constants.Row]]] = {
    "ppd-constants": constants.ppd_rows,
    "rapid-constants": constants.rapid_rows,
}
# Of each part that is drawn the study whose plots it has.
DRAWN = {
    "queueing": "queueing",
    "search": "search",
    "ppd_figures": "ppd-figures",
    "rapid": "rapid",
    "overlap": "overlap",
}
# Of each place on the page the part of the benchmark and how it is written.
TABLES: Mapping[str, tuple[str, Callable[[Results], str]]] = {
    "queueing": ("queueing", _queueing),
    "same-arrivals": ("queueing", _same_arrivals),
    "ppd": ("ppd", _ppd),
    "ppd-latency": ("ppd_figures", _ppd_latency),
    "interference": ("ppd", _interference),
    "rapid": ("rapid", _rapid),
    "rapid-sensitivity": ("rapid_sensitivity", _rapid_sensitivity),
    "overlap": ("overlap", _overlap),
}
