"""Time to first token over distance on real vLLM: layer by layer, store and forward, pull after prefill.

Two agents are connected by an emulated link that carries the prompt's KV in as much time as prefill takes. The machine's
speed changes, so each turn first measures one engine alone and sets the link's rate from it. The engines' requests do not
cross the link, so the prefill leg is sent half a round trip late. *Pull* leaves the blocks in the pool and starts the
transfer after prefill. OPEN, HAVE and data take one and a half round trips, as a notification, a request and data would.
Prefill engines have a processor of their own. All other processes, the link included, share the rest.
NIXL, where it is installed, has engines of its own for each mode inside the two ends, and its turns with the others.
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
REPEATS, WARM_UP = 5, 1  # Four minutes per link.
BAR_TRANSFER_RATIO = 0.15  # Share of the transfer time, plus one round trip.


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
    links = {item["rtt_seconds"]: item for item in earlier["links"]} | {
        item["rtt_seconds"]: item for item in table["links"]
    }
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
        "NIXL pull": lambda: sites.nixl_seconds("pull"),
        "NIXL push": lambda: sites.nixl_seconds("push"),
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
    """Return the seconds beyond the local run of the same turn, since the machine's speed changes."""
    return [value - item for value, item in zip(values, local, strict=True)]


def payload_bytes(layout: Layout, num_tokens: int) -> int:
    """Return the bytes of a transfer with full attention and linear states."""
    linear = sum(group.block_bytes for group in layout.groups if group.is_state)
    full = (group for group in layout.groups if group.keeps_all_tokens)
    return linear + sum(item.block_bytes * -(-num_tokens // item.block_tokens) for item in full)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}
