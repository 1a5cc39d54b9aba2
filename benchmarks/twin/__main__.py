"""`make bench AREA=twin`: figures of the digital twin with their bars and peers, as JSON and in benchmarks/twin/README.md.

ARGS name some of the parts, which are then measured anew; the results of the others stay as they are, as do those of a
part for which something is missing here. It ends with 1 when a bar is missed, with 2 when a part that was asked for by
name was not measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.studies.studies import Table
from benchmarks.twin.checked import case_study, ppd, theory
from benchmarks.twin.figure import Figure
from benchmarks.twin.measured_ppd import NotThere
from benchmarks.twin.page import PAGE, RESULT, draw, with_tables
from benchmarks.twin.scaled_day import autoscaling
from benchmarks.twin.speed import reproducible, speed
from benchmarks.twin.studied import (
    overlapping,
    ppd_figures,
    queueing,
    rapid_sensitivity,
    rapid_serve,
    searching,
)

Measured = Iterator[Figure | Table]
PARTS: Mapping[str, Callable[[], Measured]] = {
    "speed": speed,
    "theory": theory,
    "case_study": case_study,
    "queueing": queueing,
    "autoscaling": autoscaling,
    "ppd": ppd,
    "search": searching,
    "ppd_figures": ppd_figures,
    "rapid": rapid_serve,
    "rapid_sensitivity": rapid_sensitivity,
    "overlap": overlapping,
    "reproducible": reproducible,
}


def main() -> int:
    """Measure, print, write."""
    asked = sys.argv[1:] or list(PARTS)
    if unknown := set(asked) - PARTS.keys():
        sys.stderr.write(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}\n")
        return 2
    results: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    measured = []
    for name in asked:
        try:
            results[name] = _measured(PARTS[name]())
            measured.append(name)
        except NotThere as reason:
            print(f"not measured  {name}: {reason}", flush=True)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({name: results[name] for name in PARTS if name in results}, indent=1) + "\n")
    draw(results)
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    if not all(result["holds"] for name in measured for result in results[name]["figures"]):
        return 1
    return 2 if set(sys.argv[1:]) - set(measured) else 0


def _measured(measured: Measured) -> dict[str, Any]:
    figures, tables = [], []
    for item in measured:
        if isinstance(item, Table):
            tables.append(item.to_dict())
            continue
        figures.append(asdict(item))
        print(f"{'holds ' if item.holds else 'MISSES'}  {item.name}: {item.figure}  (bar: {item.bar})", flush=True)
        if item.peer is not None:
            print(f"        peer: {item.peer}", flush=True)
    return {"date": time.strftime("%Y-%m-%d", time.gmtime()), "figures": figures, "tables": tables}


if __name__ == "__main__":
    sys.exit(main())
