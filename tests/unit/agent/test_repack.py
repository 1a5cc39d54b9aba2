"""Repacking into another tensor-parallel size: unmappable blocks are refused and keep no slots."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from prfaas.agent.transfer.grant_check import TransferRefused
from prfaas.agent.transfer.placement import place
from prfaas.agent.transfer.plan import make_plan
from prfaas.agent.transfer.repack import start_repack
from prfaas.cachepool.pool import Pool
from prfaas.kv.layout import Layout
from prfaas.kv.repack import Side
from tests.support.repack_models import Attention, Cut, block_lists, layouts

GROUPS = [Attention(4)]


def _without_last_heads(layout: Layout) -> Layout:
    """Return the layout of a rank that claims to have the first heads."""
    (group,) = layout.groups
    return replace(
        layout, groups=(replace(group, layers=tuple(replace(layer, first_head=0) for layer in group.layers)),)
    )


def _wider(layout: Layout) -> Layout:
    """Return the layout with twice the bytes for each token."""
    (group,) = layout.groups
    wide = [
        replace(layer, offset_bytes=2 * layer.offset_bytes, payload_bytes=2 * layer.payload_bytes, dtype="float32")
        for layer in group.layers
    ]
    return replace(layout, groups=(replace(group, layers=tuple(wide)),))


@pytest.mark.parametrize(("change", "named"), [(_without_last_heads, "no rank holds head 2"), (_wider, "float32")])
def test_unmappable_rank_is_refused_and_keeps_no_slots(change: Callable[[Layout], Layout], named: str) -> None:
    pool = Pool(1 << 20)
    there, here = layouts(GROUPS, Cut(2)), layouts(GROUPS, Cut(1))
    there = there[0], change(there[1])
    plan = make_plan(there, block_lists(GROUPS, Cut(2), 96), 96)
    source = place(pool, plan, tuple(pool.arena(layout) for layout in there))
    assert source is not None
    claimed = Side(here, block_lists(GROUPS, Cut(1), 96))
    with pytest.raises(TransferRefused, match=named) as refused:
        start_repack(claimed, tuple(pool.arena(layout) for layout in here), source)
    assert refused.value.reason == "layout_mismatch"
    source.release()
    assert pool.stats().num_leases == 0
    pool.close()
