"""Time to first token over distance on real vLLM: layer by layer, store and forward, pull after prefill.

Two agents stand at the ends of an emulated link on which the prompt's KV takes as long as its prefill takes to compute:
the machine's speed changes from turn to turn, so each turn begins with one engine alone, and the link is given the rate at
which the KV takes as long as that. The engines' requests do not cross the link, so the prefill leg is sent half a round
trip late. *Pull* is a prefill that leaves its blocks in the pool, and a transfer that begins when it has ended: its open,
its answer and its data take the one and a half round trips that telling the decode side, its question and its data take.
The engines that prefill have a processor of their own; everything else, the link included, has the others.
vLLM's NixlConnector, where it is installed, has engines of its own inside the two ends, and its turn with the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.connector.nixl_peer import NixlFailed
from benchmarks.connector.sites import FAMILY, PROMPT_TOKENS, Sites
from benchmarks.connector.timeline import timeline
from prfaas.kv.layout import Layout
from tools.stack import attached_layout
from tools.wan import PAYLOAD_RATIO, WanShape

ROUND_TRIPS = (0.030, 0.080)
REPEATS, WARM_UP = 5, 1  # four minutes for one link
NIXL = "NixlConnector"
BAR_TRANSFER_RATIO = 0.15  # of the transfer time, beside one round trip


def measure(sites: Sites, round_trips: Sequence[float]) -> dict[str, Any]:
    """Return the table over links of these round trips, with what it was measured over."""
    transfer_bytes = payload_bytes(attached_layout(sites.decode.child.log), PROMPT_TOKENS - 1)
    rows = [_row(sites, rtt, transfer_bytes) for rtt in round_trips]
    return {
        "family": FAMILY,
        "prompt_tokens": PROMPT_TOKENS,
        "transfer_bytes": transfer_bytes,
        "links": rows,
    }


def merged(table: dict[str, Any], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Return the table with the links of an earlier one that this one has not measured, if that was of the same prompt."""
    if earlier is None or earlier["prompt_tokens"] != table["prompt_tokens"]:
        return table
    links = {its["rtt_seconds"]: its for its in earlier["links"]} | {its["rtt_seconds"]: its for its in table["links"]}
    return table | {"links": [links[rtt] for rtt in sorted(links)]}


def _row(sites: Sites, rtt_seconds: float, transfer_bytes: int) -> dict[str, Any]:
    seconds, not_measured = _turns(sites, rtt_seconds, transfer_bytes)
    transfer = statistics.median(seconds["local"])
    return {
        "rtt_seconds": rtt_seconds,
        "bits_per_second": round(transfer_bytes / transfer * 8 / PAYLOAD_RATIO),
        "transfer_seconds": round(transfer, 4),
        "ttft_seconds": {name: _spread(values) for name, values in seconds.items()},
        "beyond_local_seconds": {
            name: _spread(_beyond(values, seconds["local"])) for name, values in seconds.items() if name != "local"
        },
        "moments_layer_by_layer": {
            name: _spread(values) for name, values in timeline(sites, sites.pushed[WARM_UP:]).items()
        },
        "not_measured": not_measured,
        "bar_seconds": round(rtt_seconds + BAR_TRANSFER_RATIO * transfer, 4),
    }


def _turns(sites: Sites, rtt_seconds: float, transfer_bytes: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the seconds of each way, a turn after another, and why a way has none."""
    ways: dict[str, Callable[[], float]] = {
        "layer by layer": lambda: sites.pushed_seconds(sites.prefill),
        "store and forward": lambda: sites.pushed_seconds(sites.store_and_forward),
        "pull after prefill": sites.pulled_seconds,
        NIXL: sites.nixl_seconds,
    }
    not_measured: dict[str, str] = {}
    turns = []
    sites.pushed.clear()
    for _ in range(WARM_UP + REPEATS):
        found = {"local": sites.local_seconds()}
        sites.wan.set(WanShape(transfer_bytes / found["local"] * 8 / PAYLOAD_RATIO, rtt_seconds))
        for name in [way for way in ways if way not in not_measured]:
            try:
                found[name] = ways[name]()
            except NixlFailed as error:
                not_measured[name] = str(error)
        turns.append(found)
    measured = ["local", *(name for name in ways if name not in not_measured)]
    return {name: [found[name] for found in turns[WARM_UP:]] for name in measured}, not_measured


def _beyond(values: Sequence[float], local: Sequence[float]) -> list[float]:
    """What each turn's way took beyond the local one of the same turn: the machine's speed changes from turn to turn."""
    return [value - its for value, its in zip(values, local, strict=True)]


def payload_bytes(layout: Layout, num_tokens: int) -> int:
    """What a transfer of a prompt of full attention and states carries."""
    linear = sum(group.block_bytes for group in layout.groups if group.is_state)
    full = (group for group in layout.groups if group.keeps_all_tokens)
    return linear + sum(its.block_bytes * -(-num_tokens // its.block_tokens) for its in full)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}
