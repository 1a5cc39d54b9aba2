"""What ring entries, which another process writes, say of a placement's layers."""

from __future__ import annotations

import pytest

from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.agent.transfer.placement import LayerProgress, place
from prfaas.agent.transfer.plan import make_plan
from prfaas.cachepool.pool import Pool
from prfaas.hashing import NO_HASH
from prfaas.types import GroupBlocks
from tests.unit.cachepool.layouts import hybrid

GROUPS = (GroupBlocks(0, 0, (NO_HASH,) * 3), GroupBlocks(1, 0, (NO_HASH,)))


@pytest.mark.parametrize(
    ("group", "layer", "first_block", "num_blocks", "ready"),
    [
        (0, 0, 1, 2, [(1, 2, 0, 1024)]),
        (1, 0, 0, 1, [(3, 1, 0, 1024)]),
        (0, 0, 0, 0, []),
        (1, 0, 1, 0, []),
        (0, 0, 2, 2, []),
        (0, 1, 0, 1, []),
        (2, 0, 0, 1, []),
    ],
)
def test_ring_entries_outside_the_placement_are_ignored(
    group: int, layer: int, first_block: int, num_blocks: int, ready: list[tuple[int, int, int, int]]
) -> None:
    pool = Pool(1 << 20)
    arenas = (pool.arena(hybrid()),)
    placement = place(pool, make_plan((hybrid(),), GROUPS, 96), arenas, owner="test")
    assert placement is not None
    said: list[tuple[int, int, int, int]] = []
    entry = RingEntry(EntryKind.LAYER_READY, 1, group, layer, first_block, num_blocks)
    LayerProgress(placement).layer_ready(0, entry, lambda *its: said.append(its))
    assert said == ready
    pool.close()
