"""Studies that benchmarks/twin/README.md shows, with their targets."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from benchmarks.studies import studies
from benchmarks.studies.studies import Table
from benchmarks.twin import measured_chats
from benchmarks.twin.figure import Figure


def queueing() -> Iterator[Figure | Table]:
    """TTFT with queues: no bar, but the order that Table 6 has without them."""
    tables = studies.queueing(lambda *_: None)
    yield from tables
    by_load: dict[str | float, dict[str | float, float]] = {}
    for load, variant, _, mean, _ in tables[0].rows:
        by_load.setdefault(load, {})[variant] = float(mean)
    ordered = all(
        by_variant["naive-heterogeneous-pd"] < by_variant["prfaas-pd"] < by_variant["homogeneous-pd"]
        for by_variant in by_load.values()
    )
    yield Figure("with queues: naive < PrfaaS-PD < homogeneous in mean TTFT, at each load", ordered, "true", ordered)


def rapid_serve() -> Iterator[Figure | Table]:
    """RAPID-Serve's printed ratios."""
    tables = studies.rapid_serve(lambda *_: None)
    yield from tables
    for name, printed, found, tolerance in tables[0].rows:
        holds = abs(float(found) - float(printed)) <= float(tolerance)
        yield Figure(f"RAPID, {name}", round(float(found), 3), f"{printed} ± {tolerance}", holds)


def rapid_sensitivity() -> Iterator[Figure | Table]:
    """Yield the gains with the one constant that was not set blindly at other values."""
    yield from studies.rapid_sensitivity(lambda *_: None)


def searching() -> Iterator[Figure | Table]:
    """PrfaaS, Figure 5, in the twin."""
    tables = studies.searches(lambda *_: None)
    yield from tables
    worst = max((float(served) / float(solved) - 1 for table in tables for _, solved, served in table.rows), key=abs)
    name = "every split and threshold, saturated at 1.03 of the capacity: worst distance from the solver"
    yield Figure(name, round(worst, 4), "within 2 %", abs(worst) <= 0.02)


def ppd_figures() -> Iterator[Figure | Table]:
    """PPD, Figures 1, 4 and 5, and beside the fourth what was measured; no bar."""
    tables = studies.ppd_figures(lambda *_: None)
    yield from tables
    pairs = list(measured_chats.beside(tables[1].rows))
    rows = tuple((*key, *known, *found) for key, known, found in pairs)
    columns = ("conversations", "configuration", "QPS", "later turns", "measured (s)", "P90", "twin (s)", "P90")
    yield Table("PPD, Figure 4, measured", columns, rows)
    error = median(abs(found[0] / known[0] - 1) for _, known, found in pairs)
    name = f"PPD, Figure 4, {len(pairs)} runs: mean latency of a turn, median error"
    yield Figure(name, round(error, 3), "no bar: nothing is fitted to these runs", True)


def overlapping() -> Iterator[Figure | Table]:
    """PrfaaS-PD whose PD instances overlap prefill and decode; a study without a bar."""
    yield from studies.overlap(lambda *_: None)
