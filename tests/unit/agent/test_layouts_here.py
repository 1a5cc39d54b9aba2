"""Foreign arenas, those in which other engines' cuts arrive, are bounded, and given up when others need the room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prfaas.agent.transfer.grant_check import Refusal
from prfaas.agent.transfer.layouts import LayoutRegistry
from prfaas.agent.transfer.open_body import OpenBody
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.slots import LeaseId
from prfaas.kv.layout import Layout
from prfaas.types import AgentName
from tests.property.cachepool.cut_models import Attention, Cut, layouts
from tests.support.pool_integrity import check_integrity

MAX_FOREIGN = 4


def _cut(size: int, packing: str = "") -> tuple[Layout, ...]:
    return layouts([Attention(4)], Cut(size, packing=packing))


class Node:
    """An agent with an engine of one rank; engines of two ranks send to it, each release of the engine cut otherwise."""

    def __init__(self) -> None:
        self.pool = Pool(1 << 20)
        self.layouts = LayoutRegistry(AgentName("west"), self.pool, max_foreign=MAX_FOREIGN)
        (ours,) = _cut(1)
        self.pool.arena(ours)

    def open(self, block_tokens: int, *, described: bool = True) -> tuple[Arena, ...]:
        theirs = layouts([Attention(4)], Cut(2, block_tokens))
        fingerprints = tuple(its.fingerprint for its in theirs)
        return self.layouts.arenas(OpenBody(b"", fingerprints, theirs if described else (), ()))

    def use(self, arenas: tuple[Arena, ...]) -> LeaseId:
        """One slot of each."""
        lease = self.pool.open_lease("transfer")
        for arena in arenas:
            assert self.pool.allocate(arena, 1, lease)
        return lease


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    check_integrity(made.pool)
    made.pool.close()


def test_least_recently_used_foreign_arena_is_dropped(node: Node) -> None:
    node.open(16)
    node.open(48)
    node.open(16, described=False)  # used again
    node.open(64)
    assert len(node.pool.arenas) == 1 + MAX_FOREIGN
    node.open(16, described=False)
    with pytest.raises(Refusal) as refused:
        node.open(48, described=False)
    assert refused.value.reason == "no_layout", "its sender has to describe it again"
    node.open(48)


def test_foreign_arena_in_use_is_kept(node: Node) -> None:
    leases = [node.use(node.open(16)), node.use(node.open(48))]
    with pytest.raises(Refusal) as refused:
        node.open(64)
    assert refused.value.reason == "no_memory"
    node.pool.end_lease(leases[1])
    node.open(64)
    node.pool.end_lease(leases[0])


def test_open_does_not_drop_its_own_arenas(node: Node) -> None:
    held = [node.use(node.open(16)), node.use(node.open(48)[:1])]
    with pytest.raises(Refusal) as refused:
        node.open(64)
    assert refused.value.reason == "no_memory"
    node.pool.end_lease(held[0])
    arenas = node.open(64)
    assert [node.pool.arena_of(arena.layout.fingerprint) for arena in arenas] == list(arenas)
    node.pool.end_lease(held[1])


def test_arena_of_a_local_engine_is_never_dropped(node: Node) -> None:
    for its in layouts([Attention(4)], Cut(2, 16)):
        node.pool.arena(its)
        node.layouts.add_native(its)
    for block_tokens in (48, 64, 80):
        node.layouts.has_foreign(layouts([Attention(4)], Cut(2, block_tokens)))
    assert all(node.pool.arena_of(layout.fingerprint) for layout in layouts([Attention(4)], Cut(2, 16)))
