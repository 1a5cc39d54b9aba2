"""The time to the first token over distance as a table, from what `make bench AREA=connector` has measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks/results/connector.json"
WAYS = ("layer by layer", "store and forward", "pull after prefill", "NixlConnector")
_HEAD = ("round trip", "prefill, and KV on the wire", "alone", *WAYS, "the aim")


def distance_table(results: dict[str, Any]) -> str:
    """One row per link: seconds beyond one engine alone, medians with the least and the most."""
    rows = [_HEAD, ("---",) * len(_HEAD), *map(_row, results["ttft_over_distance"]["links"])]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(link: dict[str, Any]) -> tuple[str, ...]:
    beyond = [link["not_measured"].get(way) or _beyond(link["beyond_local_seconds"][way]) for way in WAYS]
    return (
        f"{1e3 * link['rtt_seconds']:.0f} ms",
        f"{link['transfer_seconds']:.2f} s each ({link['bits_per_second'] / 1e6:.1f} Mbit/s)",
        f"{link['ttft_seconds']['local']['median']:.2f} s",
        *beyond,
        f"+{link['bar_seconds']:.2f} s",
    )


def _beyond(its: dict[str, float]) -> str:
    return f"+{its['median']:.2f} s ({its['min']:.2f} to {its['max']:.2f})"


def current() -> str:
    """The table of the results in the tree."""
    return distance_table(json.loads(RESULTS.read_text()))
