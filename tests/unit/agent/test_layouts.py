"""Foreign layouts of a node."""

from collections.abc import Iterator

import pytest

from prfaas.agent.transfer.grant_check import TransferRefused
from prfaas.agent.transfer.layouts import LayoutRegistry
from prfaas.agent.transfer.open_body import OpenBody
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.slots import LeaseId
from prfaas.types import AgentName
from tests.support.pool_integrity import check_integrity
from tests.support.repack_models import Attention, Cut, layouts

MAX_FOREIGN = 4


class Node:
    """Agent with an engine of one rank, which gets blocks of two ranks in layouts that differ in block size."""

    def __init__(self) -> None:
        self.pool = Pool(1 << 20)
        self.layouts = LayoutRegistry(AgentName("west"), self.pool, max_foreign=MAX_FOREIGN)
        (native,) = layouts([Attention(4)], Cut(1))
        self.pool.arena(native)

    def open(self, block_tokens: int, *, size: int = 2, described: bool = True) -> tuple[Arena, ...]:
        foreign = layouts([Attention(4)], Cut(size, block_tokens))
        fingerprints = tuple(layout.fingerprint for layout in foreign)
        return self.layouts.arenas(OpenBody(b"", fingerprints, foreign if described else (), ()))

    def use(self, arenas: tuple[Arena, ...]) -> LeaseId:
        """Allocate one slot of each arena."""
        lease = self.pool.open_lease()
        for arena in arenas:
            assert self.pool.allocate(arena, 0, 1, lease)
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
    # The first arena is used again.
    node.open(16, described=False)
    node.open(64)
    assert len(node.pool.arenas) == 1 + MAX_FOREIGN
    node.open(16, described=False)
    with pytest.raises(TransferRefused) as refused:
        node.open(48, described=False)
    assert refused.value.reason == "no_layout", "its sender has to describe it again"
    node.open(48)


def test_foreign_arena_in_use_is_kept(node: Node) -> None:
    leases = [node.use(node.open(16)), node.use(node.open(48))]
    with pytest.raises(TransferRefused) as refused:
        node.open(64)
    assert refused.value.reason == "no_memory"
    node.pool.end_lease(leases[1])
    node.open(64)
    node.pool.end_lease(leases[0])


def test_open_does_not_drop_its_own_arenas(node: Node) -> None:
    held = [node.use(node.open(16)), node.use(node.open(48)[:1])]
    with pytest.raises(TransferRefused) as refused:
        node.open(64)
    assert refused.value.reason == "no_memory"
    node.pool.end_lease(held[0])
    arenas = node.open(64)
    assert [node.pool.arena_of(arena.layout.fingerprint) for arena in arenas] == list(arenas)
    node.pool.end_lease(held[1])


def test_arena_of_a_local_engine_is_never_dropped(node: Node) -> None:
    native = layouts([Attention(4)], Cut(2, 16))
    node.open(16)
    for layout in native:
        node.layouts.add_native(layout)
    for block_tokens in (48, 64):
        node.open(block_tokens, size=4)
    assert all(node.pool.arena_of(layout.fingerprint) for layout in native)
