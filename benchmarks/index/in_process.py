"""The index alone: look-ups, announcements, memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.index.deployment import BLOCKS_PER_PROMPT, announcements, holders, layout, node, prompt, query
from prfaas.index.memory.index import Index

PAGE_BYTES = 4096
QUERIES = 3000
KEPT_PROMPTS = 300


def measure(*, num_blocks: int, num_nodes: int, hybrid: bool) -> dict[str, Any]:
    """Fill an index with `num_blocks` distinct blocks and ask it."""
    node_layout = layout(hybrid=hybrid)
    index = Index()
    for number in range(num_nodes):
        registered = node(number, node_layout)
        index.register(registered.name, cluster=registered.cluster, epoch=1, layouts=[node_layout])
    before, seconds, residencies, kept = resident_bytes(), 0.0, 0, []
    num_prompts = num_blocks // BLOCKS_PER_PROMPT
    for number in range(num_prompts):
        hashes = prompt()
        if number % max(1, num_prompts // KEPT_PROMPTS) == 0:
            kept.append(hashes)
        for holder, share in holders(number, num_nodes):
            told = list(announcements(hashes, share, node_layout))
            started = time.perf_counter()
            index.apply(node(holder, node_layout).name, told)
            seconds += time.perf_counter() - started
            residencies += share
    grown = resident_bytes() - before - sum(map(len, kept))
    return {
        "blocks": num_prompts * BLOCKS_PER_PROMPT,
        "nodes": num_nodes,
        "hybrid": hybrid,
        "residencies": residencies,
        "announced_blocks_per_second": round(residencies / seconds),
        "bytes_per_block": round(grown / (num_prompts * BLOCKS_PER_PROMPT), 1),
        "match_2000_blocks": _ask(index, kept, time.perf_counter),
        "match_2000_blocks_processor_time": _ask(index, kept, time.thread_time),
    }


def _ask(index: Index, prompts: list[bytes], clock: Callable[[], float]) -> dict[str, float]:
    """Look-ups on one of two clocks: that of the wall, and this thread's own, which others on the machine do not disturb."""
    gc.collect()
    gc.freeze()
    seconds = []
    for number in range(QUERIES + 100):
        asked = query(prompts[number % len(prompts)])
        started = clock()
        answer = index.match(asked)
        seconds.append(clock() - started)
        assert answer.nodes, "every prompt is known"
    gc.unfreeze()
    return percentiles(seconds[100:])


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Microseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    named = {"min": min(seconds), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(seconds)}
    return {f"{name}_microseconds": round(value * 1e6, 1) for name, value in named.items()}


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
