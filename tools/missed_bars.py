"""Which bars the recorded rows of `make bench AREA=transport` miss: for its last lines and for benchmarks/README.md."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks/results/transport.json"
_BAR = re.compile(r"(?P<which>median |max )?(?P<side>>=|<=)? ?(?P<bar>[\d.]+)( for sampling)?")
_HOLDS: dict[str | None, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le, None: operator.eq}


def figure_of(row: Mapping[str, Any]) -> float | None:
    """What of a row is compared with its bar: the median, or what the bar names; None where there is no bar.

    Raises:
        ValueError: its bar is of no known form.
    """
    if row["bar"] == "-":
        return None
    found, figure = _BAR.fullmatch(row["bar"]), row["figure"]
    if found is None:
        raise ValueError(f"{row['name']}: the bar {row['bar']!r} is of no known form")
    if isinstance(figure, dict):
        which = (found["which"] or "").strip() or ("median" if "median" in figure else "ratio")
        return float(figure[which])
    return float(figure)


def missed(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows whose figure is on the wrong side of their bar, in their order."""
    return [row for row in rows if (figure := figure_of(row)) is not None and not _holds(figure, row["bar"])]


def _holds(figure: float, bar: str) -> bool:
    found = _BAR.fullmatch(bar)
    assert found is not None
    return _HOLDS[found["side"]](figure, float(found["bar"]))


def missed_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The same for people."""
    cells = [(row["link"], row["name"], f"{figure_of(row):g}", row["bar"]) for row in missed(rows)]
    head = [("link", "row", "measured", "target"), ("---",) * 4]
    return "\n".join(f"| {' | '.join(its)} |" for its in [*head, *cells]) if cells else "None."


def current() -> str:
    """The table of the results in the tree."""
    return missed_table(json.loads(RESULTS.read_text()))
