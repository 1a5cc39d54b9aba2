"""What the nodes hold, as the index knows it: blocks and bytes by node, model, KV group and tier."""

from __future__ import annotations

from typing import Any

from prfaas.index.membership import Node
from prfaas.index.segments import Holding
from prfaas.manager.state.world import World


def holdings(world: World) -> list[dict[str, Any]]:
    """One record for each part of a live node's pool that holds anything, by cluster and node. Bytes are payload."""
    records = [
        _record(member.node, holding, digest.num_blocks)
        for member in world.live()
        for holding, digest in sorted(world.index.digests(member.node.name).items())
    ]
    return sorted(records, key=lambda its: (its["cluster"], its["node"]))


def _record(node: Node, holding: Holding, num_blocks: int) -> dict[str, Any]:
    layout = next(layout for layout in node.layouts if layout.fingerprint == holding.layout)
    group = layout.groups[holding.group]
    return {
        "cluster": node.cluster,
        "node": node.name,
        "model": layout.model,
        "rank": layout.shard.rank,
        "group": holding.group,
        "kind": group.kind,
        "tier": holding.tier,
        "num_blocks": num_blocks,
        "num_bytes": num_blocks * group.block_bytes,
    }
