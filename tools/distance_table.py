"""Table and headline of TTFT by round trip, from the results of `make bench AREA=connector`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks/results/connector.json"
WAYS = ("layer by layer", "store and forward", "pull after prefill", "NIXL pull", "NIXL push")


def distance_table(results: dict[str, Any]) -> str:
    """Return one row per link: extra seconds compared with one engine alone, as median, minimum and maximum."""
    links = results["ttft_over_distance"]["links"]
    ways = [
        way for way in WAYS if any(way in link["beyond_local_seconds"] or way in link["not_measured"] for link in links)
    ]
    head = ("round trip", "prefill, and KV on the wire", "alone", *ways, "target")
    rows = [head, ("---",) * len(head), *(_row(link, ways) for link in links)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(link: dict[str, Any], ways: Sequence[str]) -> tuple[str, ...]:
    extra = [_cell(link, way) for way in ways]
    return (
        f"{1e3 * link['rtt_seconds']:.0f} ms",
        f"{link['transfer_seconds']:.2f} s each ({link['bits_per_second'] / 1e6:.1f} Mbit/s)",
        f"{link['ttft_seconds']['local']['median']:.2f} s",
        *extra,
        f"+{link['bar_seconds']:.2f} s",
    )


def _cell(link: dict[str, Any], way: str) -> str:
    seconds = link["beyond_local_seconds"].get(way)
    return _spread(seconds) if seconds else str(link["not_measured"].get(way, "not measured"))


def _spread(seconds: dict[str, float]) -> str:
    return f"+{seconds['median']:.2f} s ({seconds['min']:.2f} to {seconds['max']:.2f})"


def headline(results: dict[str, Any]) -> str:
    """Return the sentences of the README about the first link."""
    measured = results["ttft_over_distance"]
    link = measured["links"][0]
    layerwise, nixl = (link["beyond_local_seconds"][way]["median"] for way in ("layer by layer", "NIXL pull"))
    return (
        f"**What it costs.** With a round trip of {1e3 * link['rtt_seconds']:.0f} ms between the clusters, a prompt of "
        f"{measured['prompt_tokens']:,} tokens gets its first token {layerwise:.2f} s later than from one engine alone.\n"
        f"vLLM's NixlConnector adds {nixl:.2f} s on the same link ([conditions](#what-distance-costs))."
    )


def current() -> tuple[dict[str, str], dict[str, str]]:
    """Return the table and the headline for the committed results, each by its name in pages."""
    results = json.loads(RESULTS.read_text())
    return {"time to the first token over distance": distance_table(results)}, {"cost of distance": headline(results)}
