"""Tables of the measured points, for benchmarks/README.md.

python -m benchmarks.colocate.tables
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# ITL, and TTFT for each started 1,000 prompt tokens, in seconds.
SLOS = ((0.05, 2.0), (0.1, 2.0), (0.1, 1.0), (0.2, 2.0), (0.2, 1.0))
P95, LONGEST = 2, 3  # Figures of a request: its ITL, by the 95th percentile and at most.
COLOCATED = "colocated"  # Names of colocated instances begin so.
FIGURES = (("ITL P99", "itl_p99"), ("TTFT", "ttft"))

Points = Sequence[dict[str, Any]]


def tables(points: Points) -> str:
    """Return the long prompt's table, and one of goodput for each pair of objectives."""
    parts = [_long_prompt(points), *(_goodput(points, *slo, itl) for itl in (P95, LONGEST) for slo in SLOS)]
    return "\n\n".join(parts) + "\n"


def goodput(figures: Sequence[Sequence[float]], itl_seconds: float, ttft_seconds: float, itl: int = P95) -> float:
    """Return the share of requests that met both objectives."""
    met = (item[1] <= ttft_seconds * -(-item[0] // 1000) and item[itl] <= itl_seconds for item in figures)
    return sum(met) / len(figures) if figures else 1.0


def _systems(points: Points) -> list[str]:
    return list(dict.fromkeys(point["system"] for point in points))


def _by_round(points: Points, system: str, rate: float) -> dict[int, Any]:
    return {item["round"]: item["figures"] for item in points if (item["system"], item["rate"]) == (system, rate)}


def _spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Return the median, and least and greatest in brackets."""
    if len(values) < 2:
        return form(values[0]) if values else "-"
    return f"{form(statistics.median(values))} ({form(min(values))} to {form(max(values))})"


def _long_prompt(points: Points) -> str:
    names = [name for name in _systems(points) if name.startswith(COLOCATED)]
    columns = [(f"{title} of `{name}` over it", name, key) for name in names for title, key in FIGURES]
    rows = [
        f"| system | ITL P99 | TTFT | {' | '.join(title for title, _, _ in columns)} |",
        "|---" * (3 + len(columns)) + "|",
    ]
    for system in _systems(points):
        found = _by_round(points, system, 0.0)
        cells = [_spread([item[key] for item in found.values()], "{:.3f} s".format) for _, key in FIGURES]
        for _, name, key in columns:
            own = _by_round(points, name, 0.0)
            ratios = [own[number][key] / found[number][key] for number in found.keys() & own.keys()]
            cells.append(_spread(ratios, "{:.2f}".format))
        rows.append(f"| {' | '.join([system, *cells])} |")
    return "\n".join(rows)


def _goodput(points: Points, itl_seconds: float, ttft_seconds: float, itl: int) -> str:
    rates = sorted({point["rate"] for point in points if point["rate"]})
    kind = "P95 of ITL" if itl == P95 else "every ITL"
    head = (
        f"Requests within {itl_seconds * 1000:g} ms ({kind}) and TTFT {ttft_seconds:g} s for each started 1,000 tokens:"
    )
    rows = [head, "", f"| system | {' | '.join(f'{rate:g}/s' for rate in rates)} |", "|---" * (len(rates) + 1) + "|"]
    for system in _systems(points):
        found = [_by_round(points, system, rate).values() for rate in rates]
        if any(found):
            cells = [
                _spread([goodput(item, itl_seconds, ttft_seconds, itl) for item in rounds], "{:.0%}".format)
                for rounds in found
            ]
            rows.append(f"| {' | '.join([system, *cells])} |")
    return "\n".join(rows)


if __name__ == "__main__":
    file = Path(__file__).resolve().parent.parent / "results/colocate.json"
    for model, measured in json.loads(file.read_text()).items():
        sys.stdout.write(f"### {model}\n\n{tables(measured)}\n")
