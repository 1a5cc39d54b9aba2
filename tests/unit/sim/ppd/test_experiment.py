"""PPD's experiment in the twin: measurements that nothing was fitted to are met."""

import csv
from pathlib import Path
from statistics import median

import pytest

from benchmarks.studies.ppd.experiment import Effort, TurnFigures, measure, workload
from prfaas.scheduler.ppd import ContextClass, WorkloadType

MEASURED = Path(__file__).parents[3] / "data" / "ppd-grid-2P2D.csv"
ONCE = Effort(seeds=(1,))
# No constant was fitted to these workloads.
HELD_OUT: list[tuple[ContextClass, WorkloadType]] = [
    ("large", "huge_paste"),
    ("large", "mid_bal"),
    ("small", "big_paste"),
    ("small", "long_gen"),
]
RATES = (2.0, 8.0)


def measured() -> dict[tuple[str, str, float], tuple[float, float]]:
    """Turn-2 TTFT and TPOT in seconds of the runs that did not fail."""
    lines = [line for line in MEASURED.read_text().splitlines() if not line.startswith("#")]
    return {
        (row["config"], row["workload"], float(row["qps"])): (
            float(row["turn2_avg_ttft_ms"]) / 1000,
            float(row["turn2_avg_tpot_ms"]) / 1000,
        )
        for row in csv.DictReader(lines)
        if float(row["success_rate"]) >= 95
    }


@pytest.fixture(scope="module")
def pairs() -> dict[tuple[str, str, float], tuple[TurnFigures, tuple[float, float]]]:
    known = measured()
    return {
        key: (measure(name, workload(context, kind), qps=qps, effort=ONCE)[1], known[key])
        for name in ("2P_2D", "2P_2pD")
        for context, kind in HELD_OUT
        for qps in RATES
        if (key := (name, f"{context}_{kind}", qps)) in known
    }


Pairs = dict[tuple[str, str, float], tuple[TurnFigures, tuple[float, float]]]


def test_held_out_latencies_are_met(pairs: Pairs) -> None:
    assert median(abs(held_out.ttft_seconds / ttft - 1) for held_out, (ttft, _) in pairs.values()) < 0.25
    assert median(abs(held_out.tpot_seconds / tpot - 1) for held_out, (_, tpot) in pairs.values()) < 0.15


def test_local_prefill_gains_where_measured(pairs: Pairs) -> None:
    for (name, work, qps), (held_out, (ttft, _)) in pairs.items():
        if name == "2P_2D":
            rest, (other_ttft, _) = pairs["2P_2pD", work, qps]
            assert (held_out.ttft_seconds > rest.ttft_seconds) == (ttft > other_ttft)
