"""Rows of `make bench AREA=transport` that miss their bar. A bar is the target of a row."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks/results/transport.json"
_BAR = re.compile(r"(?P<statistic>median |max )?(?P<side>>=|<=)? ?(?P<bar>[\d.]+)( for sampling)?")
_HOLDS: dict[str | None, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le, None: operator.eq}


def figure_of(row: Mapping[str, Any]) -> float | None:
    """Return the value to compare with the bar: the median, or the statistic that the bar names. None without a bar.

    Raises:
        ValueError: The bar has an unknown form.
    """
    if row["bar"] == "-":
        return None
    match, figure = _BAR.fullmatch(row["bar"]), row["figure"]
    if match is None:
        raise ValueError(f"{row['name']}: the bar {row['bar']!r} has an unknown form")
    if isinstance(figure, dict):
        statistic = (match["statistic"] or "").strip() or ("median" if "median" in figure else "ratio")
        return float(figure[statistic])
    return float(figure)


def missed(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows that miss their bar, in order."""
    return [row for row in rows if (figure := figure_of(row)) is not None and not _holds(figure, row["bar"])]


def _holds(figure: float, bar: str) -> bool:
    match = _BAR.fullmatch(bar)
    assert match is not None
    return _HOLDS[match["side"]](figure, float(match["bar"]))


def missed_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows that miss their bar as a Markdown table."""
    cells = [(row["link"], row["name"], f"{figure_of(row):g}", row["bar"]) for row in missed(rows)]
    head = [("link", "row", "measured", "target"), ("---",) * 4]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*head, *cells]) if cells else "None."


def current() -> str:
    """Return the table for the committed results."""
    return missed_table(json.loads(RESULTS.read_text()))
