"""Table of TTFT by round trip, from the results of `make bench AREA=connector`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks/results/connector.json"
WAYS = ("layer by layer", "store and forward", "pull after prefill", "NixlConnector")
_HEAD = ("round trip", "prefill, and KV on the wire", "alone", *WAYS, "target")


def distance_table(results: dict[str, Any]) -> str:
    """Return one row per link: extra seconds compared with one engine alone, as median, minimum and maximum."""
    rows = [_HEAD, ("---",) * len(_HEAD), *map(_row, results["ttft_over_distance"]["links"])]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(link: dict[str, Any]) -> tuple[str, ...]:
    extra = [link["not_measured"].get(way) or _spread(link["beyond_local_seconds"][way]) for way in WAYS]
    return (
        f"{1e3 * link['rtt_seconds']:.0f} ms",
        f"{link['transfer_seconds']:.2f} s each ({link['bits_per_second'] / 1e6:.1f} Mbit/s)",
        f"{link['ttft_seconds']['local']['median']:.2f} s",
        *extra,
        f"+{link['bar_seconds']:.2f} s",
    )


def _spread(seconds: dict[str, float]) -> str:
    return f"+{seconds['median']:.2f} s ({seconds['min']:.2f} to {seconds['max']:.2f})"


def current() -> str:
    """Return the table for the committed results."""
    return distance_table(json.loads(RESULTS.read_text()))
