"""`make bench AREA=router`: writes benchmarks/results/router.json; see benchmarks/README.md. ARGS name some of its parts."""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.router import control, decision, door, placement

RESULTS = Path(__file__).resolve().parent.parent / "results" / "router.json"
Row = dict[str, Any]


def _door() -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        return uvloop.run(door.measure(Path(directory)))


def _decision() -> list[Row]:
    """Return each in a process of its own, whose memory is this index's and nothing else's."""
    rows = []
    for hybrid in (False, True):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            rows.append(pool.submit(decision.row, hybrid=hybrid).result())
    return rows


PARTS: dict[str, Callable[[], list[Row]]] = {
    "decision": _decision,
    "placement": placement.measure,
    "door": _door,
    "control": control.measure,
}


def main() -> None:
    """Measure the parts that are named, or all; the rows of the others stay as they were."""
    wanted = sys.argv[1:] or list(PARTS)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in wanted:
        results[name] = PARTS[name]()
        for row in results[name]:
            print("holds " if row["holds"] else "MISSES", row["name"], row["figure"], row["bar"], row.get("peers", ""))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
