"""PPD's experiment in the twin: held-out measurements are met, and the table is one that managers load."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import median

import pytest

from benchmarks.studies.ppd.deployments import kinds
from benchmarks.studies.ppd.experiment import Effort, TurnFigures, measure, ppd_table, workload
from benchmarks.studies.ppd.interference import slowdown_ratio
from prfaas.errors import ConfigError
from prfaas.ppd.workloads import SECOND_TURNS
from prfaas.scheduler.ppd import ContextClass, WorkloadType, read_measured, to_measured
from prfaas.sim.workload.conversations import Turn

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


@pytest.mark.parametrize("name", ["4R", "1P_1D_2pD", "2R_1P_1D"])
def test_every_configuration_of_the_grid_has_four_nodes_and_answers(name: str) -> None:
    assert len(kinds(name)) == 4
    later = measure(name, [Turn(128, 16), Turn(64, 16)], qps=1.0, effort=ONCE)[1]
    assert later.success_ratio == 1.0


@pytest.mark.parametrize("name", ["2P", "2D_1R", "0P_2D", "2X"])
def test_unknown_configuration_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="PPD configuration"):
        kinds(name)


def test_the_table_is_one_that_managers_load() -> None:
    done: list[int] = []
    table = ppd_table(1, 3, rates=(0.5,), progress=lambda number, _: done.append(number))
    assert len(table.entries) == 2 * len(SECOND_TURNS)
    assert len(done) == 2 * len(table.entries)
    again = read_measured(json.loads(json.dumps(to_measured(table))))
    for simulated, measured in zip(again.entries, table.entries, strict=True):
        assert table.score(simulated) == pytest.approx(table.score(measured))


@pytest.mark.parametrize(
    ("num_decoding", "num_prefills", "measured_ratio"), [(10, 1, 0.02), (50, 1, 0.57), (90, 4, 1.40), (150, 1, 1.14)]
)
def test_full_prefill_slows_decode_as_measured(num_decoding: int, num_prefills: int, measured_ratio: float) -> None:
    assert slowdown_ratio(num_decoding, num_prefills, "full") == pytest.approx(measured_ratio, abs=0.15)


def test_append_hardly_slows_decode() -> None:
    assert 0 < slowdown_ratio(200, 4, "append") < 0.05
    assert slowdown_ratio(200, 0, "full") == 0.0
