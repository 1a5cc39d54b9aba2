"""`python -m benchmarks.twin`: every figure that the digital twin must hold, its bar and its peer, as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.twin.checked import case_study, ppd, rapid_serve, theory
from benchmarks.twin.speed import reproducible, speed

RESULT = Path(__file__).parents[1] / "results" / "twin.json"


def main() -> int:
    """Measure, print, write; 1 when a bar is missed."""
    figures = []
    for part in (speed, theory, case_study, ppd, rapid_serve, reproducible):
        for figure in part():
            figures.append(figure)
            print(
                f"{'holds ' if figure.holds else 'MISSES'}  {figure.name}: {figure.figure}  (bar: {figure.bar})",
                flush=True,
            )
            if figure.peer is not None:
                print(f"        peer: {figure.peer}", flush=True)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps([asdict(figure) for figure in figures], indent=1, default=float) + "\n")
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
