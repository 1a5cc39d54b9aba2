"""Placements: slots of a transfer's objects, their publication as prefix blocks, and layers from the ring."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.agent.transfer.placement import LayerProgress, Placement, place
from prfaas.agent.transfer.plan import TransferPlan, make_plan
from prfaas.cachepool.pool import Pool
from prfaas.hashing import NO_HASH, HashChain, root_hash
from prfaas.pool_events import BlockStored, PoolEvent
from prfaas.types import GroupBlocks
from tests.support.pool_integrity import check_integrity
from tests.support.pool_layouts import SLOT_BYTES, hybrid

ROOT = root_hash("hybrid")
CHAIN = HashChain(ROOT, range(110))
NUM_TOKENS = 110
STATE = CHAIN.at(NUM_TOKENS)
FULL = CHAIN.blocks(32, first_block=0, num_tokens=NUM_TOKENS)[:-1]
GROUPS = (
    # Three full blocks, and a partial block that is valid for 110 tokens only.
    GroupBlocks(0, 0, (*FULL, STATE), ROOT),
    GroupBlocks(1, 0, (STATE,), CHAIN.at(96)),
    GroupBlocks(2, 1, (*FULL[1:], NO_HASH), FULL[0]),
)


class Node:
    def __init__(self) -> None:
        self.events: list[PoolEvent] = []
        self.pool = Pool(1 << 20, on_change=lambda change: self.events.extend(change.each()))
        self.arenas = (self.pool.arena(hybrid("rank 0")), self.pool.arena(hybrid("rank 1")))
        self.plan: TransferPlan = make_plan(tuple(arena.layout for arena in self.arenas), GROUPS, NUM_TOKENS)

    def place(self) -> Placement:
        placement = place(self.pool, self.plan, self.arenas)
        assert placement is not None
        return placement

    def stored(self) -> set[tuple[bytes, int, bytes, bytes, int]]:
        events = [event for event in self.events if isinstance(event, BlockStored)]
        assert len(events) == len(self.events)
        return {(e.layout, e.group, e.block_hash, e.parent, e.num_tokens) for e in events}

    def expected(self) -> set[tuple[bytes, int, bytes, bytes, int]]:
        blocks = [(0, FULL[0], ROOT, 32), (0, FULL[1], FULL[0], 64), (0, FULL[2], FULL[1], 96)]
        blocks += [(0, STATE, CHAIN.at(96), 110), (1, STATE, CHAIN.at(96), 110)]
        blocks += [(2, FULL[1], FULL[0], 64), (2, FULL[2], FULL[1], 96)]
        return {(arena.layout.fingerprint, *block) for arena in self.arenas for block in blocks}


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    check_integrity(node.pool)
    node.pool.close()


@pytest.mark.parametrize("order", [range(16), reversed(range(16)), [0, 2, 1, 3, *range(8, 16), *range(4, 8)]])
def test_blocks_are_published_in_any_order_of_completion(node: Node, order: Iterable[int]) -> None:
    placement = node.place()
    placement.publish(order)
    placement.release()
    assert node.stored() == node.expected()


def test_next_placement_holds_all_hashed_blocks(node: Node) -> None:
    first = node.place()
    first.publish(range(16))
    first.release()
    second = node.place()
    assert second.held == frozenset(range(16)) - {7, 15}
    second.publish(range(16))
    second.release()
    assert len(node.events) == len(node.expected())


def test_consecutive_held_objects_of_one_size_form_one_range(node: Node) -> None:
    placement = node.place()
    assert list(placement.held_ranges()) == []
    larger = make_plan((hybrid(), hybrid(slot_bytes=2048)), GROUPS, NUM_TOKENS)
    for plan, expected in ((node.plan, [(0, 2), (5, 5)]), (larger, [(0, 2), (5, 3), (8, 2)])):
        held = replace(placement, plan=plan, held=frozenset({0, 1, *range(5, 10)}))
        assert list(held.held_ranges()) == expected
    placement.release()


def test_placement_without_allocation_needs_every_block(node: Node) -> None:
    assert place(node.pool, node.plan, node.arenas, may_allocate=False) is None
    assert node.pool.stats().num_leases == 0


UNHASHED_GROUPS = (GroupBlocks(0, 0, (NO_HASH,) * 3), GroupBlocks(1, 0, (NO_HASH,)))


@pytest.mark.parametrize(
    ("group", "layer", "first_block", "num_blocks", "ready"),
    [
        (0, 0, 1, 2, [(1, 2, 0, SLOT_BYTES)]),
        (1, 0, 0, 1, [(3, 1, 0, SLOT_BYTES)]),
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
    placement = place(pool, make_plan((hybrid(),), UNHASHED_GROUPS, 96), arenas)
    assert placement is not None
    seen: list[tuple[int, int, int, int]] = []
    entry = RingEntry(EntryKind.LAYER_READY, 1, group, layer, first_block, num_blocks)
    LayerProgress(placement).layer_ready(0, entry, lambda *arguments: seen.append(arguments))
    assert seen == ready
    pool.close()
