"""Rows that miss their bar, for each form of bar and figure."""

import json
from typing import Any

import pytest

from benchmarks.transport.__main__ import _print_misses
from tools.missed_bars import RESULTS, figure_of, missed, missed_table


def _row(figure: Any, bar: str) -> dict[str, Any]:
    return {"link": "metro", "name": "bulk", "figure": figure, "bar": bar}


@pytest.mark.parametrize(
    ("figure", "bar", "holds"),
    [
        (0.97, ">= 0.97", True),
        (0.969, ">= 0.97", False),
        ({"median": 0.98, "min": 0.5, "max": 1.0}, "median >= 0.97", True),
        ({"median": 0.96, "min": 0.5, "max": 1.0}, "median >= 0.97", False),
        ({"median": 0.1, "min": 0.0, "max": 0.3}, "max <= 0.2", False),
        ({"ratio": 1.7, "seconds_per_gb": 0.5}, "<= 1.6", False),
        (0.0091, "<= 0.005 for sampling", False),
        (0, "0", True),
        (1, "0", False),
        ("skipped: not installed", "-", True),
    ],
)
def test_row_meets_or_misses_its_bar(figure: Any, bar: str, holds: bool) -> None:
    assert missed([_row(figure, bar)]) == ([] if holds else [_row(figure, bar)])


def test_recorded_bars_have_a_known_form_and_an_unknown_form_is_an_error() -> None:
    for row in json.loads(RESULTS.read_text()):
        figure_of(row)
    with pytest.raises(ValueError, match="unknown form"):
        missed([_row(1.0, "about 1")])


def test_run_lists_the_missed_bars_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [_row(1.0, ">= 0.9"), _row(0.8, ">= 0.9")]
    assert _print_misses(rows) == 1
    assert capsys.readouterr().out == "MISSES metro: bulk: 0.8, bar >= 0.9\n"
    assert _print_misses(rows[:1]) == 0
    assert "| metro | bulk | 0.8 | >= 0.9 |" in missed_table(rows)
    assert missed_table(rows[:1]) == "None."
