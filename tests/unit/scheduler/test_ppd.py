"""PPD's table and rules against the authors' own table and their measurements."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prfaas.ppd.table import SECOND_TURNS, PpdRun, build_table
from prfaas.scheduler.ppd import (
    LaterTurn,
    TableCell,
    context_class,
    prefills_locally,
    read_measured,
    to_measured,
    workload_type,
)

DATA = Path(__file__).parents[2] / "data"
AUTHORS: dict[str, Any] = json.loads((DATA / "ppd-table-2P2D.json").read_text())
TABLE = read_measured(AUTHORS)


def _runs(config: str) -> list[PpdRun]:
    lines = (DATA / "ppd-grid-2P2D.csv").read_text().splitlines()[1:]
    return [_run(row) for row in csv.DictReader(lines) if row["config"] == config]


def _run(row: dict[str, Any]) -> PpdRun:
    context, _, workload = row["workload"].partition("_")
    ttft, tpot = float(row["turn2_avg_ttft_ms"]) / 1000, float(row["turn2_avg_tpot_ms"]) / 1000
    return PpdRun(TableCell(context, workload, float(row["qps"])), ttft, tpot, float(row["success_rate"]) / 100)


def test_scores_and_choices_equal_the_authors_in_all_180_cells() -> None:
    assert len(AUTHORS["entries"]) == len(TABLE.entries) == 180
    for expected, entry in zip(AUTHORS["entries"], TABLE.entries, strict=True):
        assert TABLE.score(entry) == pytest.approx(expected["score"], abs=1e-9)
        assert (TABLE.score(entry) > 0) == expected["use_ppd"]


def test_table_built_from_the_measured_grid_equals_the_authors() -> None:
    built = build_table(_runs("2P_2D"), _runs("2P_2pD"), ttft_weight=1.0, tpot_weight=1.0)
    cells = {entry.cell: entry for entry in TABLE.entries}
    assert len(built.entries) == 180
    for entry in built.entries:
        wanted = cells[entry.cell]
        assert built.score(entry) == pytest.approx(TABLE.score(wanted), abs=1e-4)  # The grid has 4 digits.
        assert (built.score(entry) > 0) == (TABLE.score(wanted) > 0)


@pytest.mark.parametrize(
    "entry", AUTHORS["entries"], ids=lambda entry: f"{entry['context_class']}-{entry['workload_type']}-{entry['qps']}"
)
def test_every_workload_of_the_grid_is_decided_like_the_authors_engine(entry: dict[str, Any]) -> None:
    num_input, num_output = SECOND_TURNS[entry["workload_type"]]
    turn = LaterTurn(num_input, {"small": 256, "large": 2048}[entry["context_class"]], num_output)
    if entry["workload_type"] != "tiny":  # By the authors' own rule the ratio of 0.5 makes it small and balanced.
        assert prefills_locally(TABLE, turn, qps=entry["qps"]) == entry["use_ppd"]


@pytest.mark.parametrize(
    ("num_input", "num_output", "kind"),
    [
        (24, 100, "short_gen"),
        (25, 100, "small_bal"),
        (10, 64, "tiny"),
        (10, 65, "short_gen"),
        (10, 257, "long_gen"),
        (10, 513, "very_long_gen"),
        (64, 32, "small_bal"),
        (65, 33, "mid_bal"),
        (65, 32, "mid_paste"),
        (256, 1, "mid_paste"),
        (257, 1, "big_paste"),
        (512, 1, "big_paste"),
        (513, 1, "huge_paste"),
        (513, 0, "huge_paste"),
    ],
)
def test_turn_is_classified_by_its_ratio_and_then_by_its_length(num_input: int, num_output: int, kind: str) -> None:
    assert workload_type(num_input, num_output) == kind


def test_context_and_rate_map_to_the_nearest_measured_cell() -> None:
    assert [context_class(n) for n in (0, 512, 513, 4096, 100_000)] == ["small", "small", "large", "large", "large"]
    asked = (0.0, 0.6, 0.75, 1.4, 1.5, 3.0, 9.0, 14.0, 18.0, 500.0)
    assert [TABLE.nearest_qps(qps) for qps in asked] == [0.5, 0.5, 1, 1, 2, 4, 10, 16, 20, 20]


def test_missing_and_failed_cells_are_local() -> None:
    turn = LaterTurn(1024, 2048, 32)
    against = replace(TABLE, ttft_weight=0.0, tpot_weight=1000.0)
    assert not prefills_locally(against, turn, qps=20)
    failed = tuple(replace(entry, pd_ttft_seconds=0.0) for entry in TABLE.entries)
    assert prefills_locally(replace(against, entries=failed), turn, qps=20)
    only_small = tuple(entry for entry in TABLE.entries if entry.context_class == "small")
    assert prefills_locally(replace(against, entries=only_small), turn, qps=20)


def test_cell_that_failed_one_way_is_not_averaged() -> None:
    good = PpdRun(TableCell("small", "tiny", 1.0), 0.1, 0.01, 1.0)
    bad = replace(good, success_ratio=0.5)
    weights = {"ttft_weight": 1.0, "tpot_weight": 1.0}
    assert build_table([bad], [good], **weights).entries[0].pd_failed
    with pytest.raises(ValueError, match="at least one entry"):
        build_table([good], [bad], **weights)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"entries": [{"qps": 1}], "weights": {}},
        {**AUTHORS, "entries": []},
        {**AUTHORS, "entries": AUTHORS["entries"][:1] * 2},
    ],
)
def test_file_without_a_table_is_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"PPD|entry|twice"):
        read_measured(fields)


def test_table_in_the_authors_form_is_written_as_it_was_read() -> None:
    written = to_measured(TABLE)
    assert written["weights"] == AUTHORS["weights"]
    for entry, expected in zip(written["entries"], AUTHORS["entries"], strict=True):
        assert entry == pytest.approx({name: expected[name] for name in entry}, abs=1e-6)


def test_local_share_of_the_authors_table_falls_with_the_tpot_weight() -> None:
    weights = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 100.0)
    tables = [replace(TABLE, tpot_weight=weight) for weight in weights]
    costly = [entry for entry in TABLE.entries if entry.ppd_tpot_seconds > entry.pd_tpot_seconds]
    shares = [sum(table.score(entry) > 0 for entry in costly) for table in tables]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1]
