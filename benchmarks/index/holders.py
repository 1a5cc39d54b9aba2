"""Cost of further holders of the same blocks: other nodes, the node's SSD, a state for each cell."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from typing import Any

from benchmarks.index.deployment import BLOCKS_PER_PROMPT, announcements, layout, node, prompt
from benchmarks.index.in_process import resident_bytes
from prfaas.index.memory.index import Index
from prfaas.index.segments import Announcement, Checkpoint, Segment
from prfaas.pool_events import Tier

NUM_NODES = 8
BARS = {"bytes_per_block": 16, "bytes_per_block_and_further_holder": 3}


def measure(*, num_blocks: int, hybrid: bool) -> dict[str, Any]:
    """Return every prompt whole on one node, then on all, then on the SSDs of all as well."""
    node_layout = layout(hybrid=hybrid)
    index = Index()
    for number in range(NUM_NODES):
        registered = node(number, node_layout)
        index.register(registered.name, cluster=registered.cluster, epoch=1, layouts=[node_layout])
    prompts = [prompt() for _ in range(num_blocks // BLOCKS_PER_PROMPT)]
    kept = len(prompts) * BLOCKS_PER_PROMPT
    sizes = [_settled_bytes()]

    def hold(first: int, end: int, tier: Tier) -> None:
        for number in range(first, end):
            for hashes in prompts:
                told = announcements(hashes, BLOCKS_PER_PROMPT, node_layout)
                index.apply(node(number, node_layout).name, [_in_tier(each, tier) for each in told])
        sizes.append(_settled_bytes())

    hold(0, 1, "memory")
    hold(1, NUM_NODES, "memory")
    hold(0, NUM_NODES, "ssd")
    grown = [(after - before) / kept for before, after in itertools.pairwise(sizes)]
    return {
        "blocks": kept,
        "hybrid": hybrid,
        "bars": BARS,
        "bytes_per_block": round(grown[0], 1),
        "bytes_per_block_and_further_node": round(grown[1] / (NUM_NODES - 1), 2),
        "bytes_per_block_and_further_tier": round(grown[2] / NUM_NODES, 2),
    }


def _in_tier(told: Announcement, tier: Tier) -> Announcement:
    if isinstance(told, Segment):
        states = tuple((replace(holding, tier=tier), bits) for holding, bits in told.states)
        return replace(told, holding=replace(told.holding, tier=tier), states=states)
    assert isinstance(told, Checkpoint)
    return replace(told, holding=replace(told.holding, tier=tier))


def _settled_bytes() -> int:
    gc.collect()
    return resident_bytes()
