"""Time to first token over distance on real vLLM: layer by layer, store and forward, pull after prefill.

Two agents stand at the ends of an emulated link on which the prompt's KV takes as long as its prefill takes to compute:
the machine's speed changes from turn to turn, so each turn begins with one engine alone, and the link is given the rate at
which the KV takes as long as that. The engines' requests do not cross the link, so the prefill leg is sent half a round
trip late. *Pull* is a prefill that leaves its blocks in the pool, and a transfer that begins when it has ended: its open,
its answer and its data take the one and a half round trips that telling the decode side, its question and its data take.
The engines that prefill have a processor of their own; everything else, the link included, has the others.
vLLM's NixlConnector, where it is installed, pulls over the same links afterwards, with engines inside the two ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.connector import nixl_peer
from benchmarks.connector.sites import FAMILY, PROMPT_TOKENS, Sites
from benchmarks.connector.timeline import timeline
from prfaas.cachepool.layout import Layout
from tools.stack import attached_layout
from tools.wan import PAYLOAD_RATIO, Wan, WanShape

ROUND_TRIPS = (0.030, 0.080)
REPEATS, WARM_UP = 5, 1  # four minutes for one link
BAR_TRANSFER_RATIO = 0.15  # of the transfer time, beside one round trip


def measure(sites: Sites, round_trips: Sequence[float]) -> dict[str, Any]:
    """The table over links of these round trips, with what it was measured over."""
    transfer_bytes = payload_bytes(attached_layout(sites.decode.child.log), PROMPT_TOKENS - 1)
    rows = [_row(sites, rtt, transfer_bytes) for rtt in round_trips]
    return {
        "family": FAMILY,
        "prompt_tokens": PROMPT_TOKENS,
        "transfer_bytes": transfer_bytes,
        "links": rows,
    }


def merged(table: dict[str, Any], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """The table with the links of an earlier one that this one has not measured, if that was of the same prompt."""
    if earlier is None or earlier["prompt_tokens"] != table["prompt_tokens"]:
        return table
    links = {its["rtt_seconds"]: its for its in earlier["links"]} | {its["rtt_seconds"]: its for its in table["links"]}
    return table | {"links": [links[rtt] for rtt in sorted(links)]}


def _row(sites: Sites, rtt_seconds: float, transfer_bytes: int) -> dict[str, Any]:
    ways: dict[str, Callable[[], float]] = {
        "layer by layer": lambda: sites.pushed_seconds(sites.prefill),
        "store and forward": lambda: sites.pushed_seconds(sites.store_and_forward),
        "pull after prefill": sites.pulled_seconds,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ("local", *ways)}
    sites.pushed.clear()
    for turn in range(WARM_UP + REPEATS):
        found = {"local": sites.local_seconds()}
        sites.wan.set(WanShape(transfer_bytes / found["local"] * 8 / PAYLOAD_RATIO, rtt_seconds))
        found |= {name: way() for name, way in ways.items()}
        for name, value in found.items() if turn >= WARM_UP else ():
            seconds[name].append(value)
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
        "bar_seconds": round(rtt_seconds + BAR_TRANSFER_RATIO * transfer, 4),
    }


def add_nixl(table: dict[str, Any], wan: Wan) -> None:
    """Add what vLLM's NixlConnector takes over the same links; its local figure is of its own decode engine."""
    shapes = [WanShape(its["bits_per_second"], its["rtt_seconds"]) for its in table["links"]]
    found = nixl_peer.measure(wan, shapes, warm_up=WARM_UP, repeats=REPEATS)
    for index, link in enumerate(table["links"]):
        link["nixl_connector"] = found if isinstance(found, str) else _nixl(found[index])


def _nixl(seconds: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "ttft_seconds": {name: _spread(values) for name, values in seconds.items()},
        "beyond_local_seconds": _spread(_beyond(seconds["pulled"], seconds["local"])),
    }


def _beyond(values: Sequence[float], local: Sequence[float]) -> list[float]:
    """What each turn's way took beyond the local one of the same turn: the machine's speed changes from turn to turn."""
    return [value - its for value, its in zip(values, local, strict=True)]


def payload_bytes(layout: Layout, num_tokens: int) -> int:
    """What a transfer of a prompt of full attention and states carries."""
    linear = sum(its.block_bytes for its in layout.groups if its.kind == "linear_state")
    full = (its for its in layout.groups if its.kind == "full_attention")
    return linear + sum(its.block_bytes * -(-num_tokens // its.block_tokens) for its in full)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}
