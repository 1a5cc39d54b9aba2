"""Promises of the pool: separate budgets, leases that end, chains that leave from the tail."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from prfaas.cachepool.arena import PAGE_BYTES, Arena
from prfaas.cachepool.block_run import BlockIdentity
from prfaas.cachepool.pool import Pool, SlotPool
from prfaas.pool_events import BlockRemoved, BlockStored, PoolEvent
from prfaas.types import Shard
from tests.support.pool_integrity import check_integrity
from tests.support.pool_layouts import ROOT, SLOT_BYTES, hybrid, name

ATTENTION, STATE, WINDOW = 0, 1, 2


class Node:
    """A pool of 8 transfer and `num_prefix` prefix slots, and what it announced."""

    def __init__(self, num_prefix: int = 8, *, num_transfer: int = 8) -> None:
        num_slots = num_prefix + num_transfer
        self.events: list[PoolEvent] = []
        self.pool = Pool(
            num_slots * SLOT_BYTES,
            transfer_ratio=num_transfer / num_slots,
            on_change=lambda change: self.events.extend(change.each()),
        )
        self.arena: Arena = self.pool.arena(hybrid())

    def keep(self, *numbers: int, parent: int | None = None, group: int = ATTENTION) -> None:
        """Publish a chain of idle blocks."""
        lease = self.pool.open_lease()
        before = ROOT if parent is None else name(parent)
        start = 0 if parent is None else self._tokens_at(parent)
        for depth, number in enumerate(numbers):
            slots = self.pool.allocate(self.arena, 0, 1, lease)
            assert slots is not None
            tokens = start if start and group == STATE else start + 32 * (depth + 1)
            stored = self.pool.publish(self.arena, slots[0], BlockIdentity(group, name(number), before, tokens, before))
            assert stored
            before = name(number)
        self.pool.end_lease(lease)
        check_integrity(self.pool)

    def _tokens_at(self, number: int) -> int:
        """Return the length of the chain up to an attention block, or 0 without that block."""
        slot = self.pool.find(self.arena, ATTENTION, name(number))
        return 0 if slot is None else self.pool.identity(self.arena, slot).num_tokens

    def holds(self, *numbers: int, group: int = ATTENTION) -> list[int]:
        return [number for number in numbers if self.pool.find(self.arena, group, name(number)) is not None]

    def slot(self, number: int) -> int:
        slot = self.pool.find(self.arena, ATTENTION, name(number))
        assert slot is not None
        return slot

    def use(self, *numbers: int) -> None:
        lease = self.pool.open_lease()
        self.pool.pin(self.arena, [self.slot(number) for number in numbers], lease)
        self.pool.end_lease(lease)


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    check_integrity(node.pool)
    node.pool.close()


def test_each_allocation_gives_a_slot_a_new_generation(node: Node) -> None:
    lease = node.pool.open_lease()
    first = node.pool.allocate(node.arena, 0, 1, lease)
    assert first is not None
    generation = node.arena.generation(first[0])
    node.pool.end_lease(lease)
    again = node.pool.allocate(node.arena, 0, 1, node.pool.open_lease())
    assert again == first
    assert node.arena.generation(first[0]) > generation


def test_quarantined_slots_count_apart_until_their_lease_ends(node: Node) -> None:
    writing, reading = node.pool.open_lease(), node.pool.open_lease()
    node.pool.allocate(node.arena, 0, 3, writing)
    node.pool.allocate(node.arena, 0, 1, reading)
    node.pool.quarantine(writing)
    assert node.pool.stats().slots_by_kind == {"prefix": 0, "transfer": 1, "quarantined": 3, "free": 0}
    node.pool.end_lease(writing)
    node.pool.end_lease(writing)
    assert node.pool.stats().slots_by_kind == {"prefix": 0, "transfer": 1, "quarantined": 0, "free": 3}


def test_chains_are_evicted_from_the_tail_least_recently_used_first(node: Node) -> None:
    node.keep(1, 2, 3, 4)
    node.keep(11, 12, 13, 14)
    node.use(1, 2, 3, 4)
    node.keep(21, 22, 23, 24, 25)
    removed = [event.block_hash for event in node.events if isinstance(event, BlockRemoved)]
    assert removed == [name(14), name(13), name(12), name(11), name(4)]
    assert node.holds(1, 2, 3) == [1, 2, 3]


def test_a_block_is_not_evicted_for_its_own_child() -> None:
    node = Node(num_prefix=1)
    node.keep(1)
    lease = node.pool.open_lease()
    slots = node.pool.allocate(node.arena, 0, 1, lease)
    assert slots is not None
    assert not node.pool.publish(node.arena, slots[0], BlockIdentity(ATTENTION, name(2), name(1), 64, name(1)))
    node.pool.end_lease(lease)
    assert node.holds(1, 2) == [1]
    node.keep(3)
    assert node.holds(1, 3) == [3]


def test_recency_counts_from_the_start_of_a_read() -> None:
    node = Node(num_prefix=2)
    node.keep(1)
    node.keep(2)
    early, late = node.pool.open_lease(), node.pool.open_lease()
    node.pool.pin(node.arena, [node.slot(1)], early)
    node.pool.pin(node.arena, [node.slot(2)], late)
    node.pool.end_lease(late)
    node.pool.end_lease(early)
    node.keep(3)
    assert node.holds(1, 2, 3) == [2, 3]


def test_a_state_at_a_unit_end_can_leave() -> None:
    node = Node(num_prefix=1)
    node.keep(1, parent=1, group=STATE)
    node.keep(2, parent=2, group=STATE)
    assert node.holds(1, 2, group=STATE) == [2]
    assert node.pool.states_after(node.arena, STATE, name(1)) == {}
    assert node.pool.states_after(node.arena, STATE, name(2)) == {name(2): 32}


def test_a_block_that_names_itself_as_parent_can_leave() -> None:
    node = Node(num_prefix=1)
    node.keep(1, parent=1)
    node.keep(2)
    assert node.holds(1, 2) == [2]


def test_a_partial_tail_keeps_its_previous_block() -> None:
    node = Node(num_prefix=2)
    node.keep(1)
    lease = node.pool.open_lease()
    slots = node.pool.allocate(node.arena, 0, 1, lease)
    assert slots is not None
    unit = name(999)
    node.pool.publish(node.arena, slots[0], BlockIdentity(ATTENTION, name(2), unit, 50, name(1)))
    node.pool.end_lease(lease)
    assert node.events[-1] == BlockStored(node.arena.layout.fingerprint, ATTENTION, name(2), unit, 50)
    node.keep(3)
    assert node.holds(1, 2, 3) == [1, 3]


def test_memory_of_free_slots_moves_to_another_arena() -> None:
    slot_bytes = 64 * PAGE_BYTES
    pool = Pool(8 * slot_bytes, transfer_ratio=1.0)
    first, second = (pool.arena(hybrid(model, slot_bytes=slot_bytes)) for model in ("first", "second"))
    for arena in (first, second, first):
        lease = pool.open_lease()
        taken = pool.allocate(arena, 0, 8, lease)
        assert taken is not None
        for slot in taken:
            arena.slot_view(slot)[:] = b"x" * slot_bytes
        pool.end_lease(lease)
        check_integrity(pool)
        used = sum(_used_bytes(each) for each in (first, second))
        assert used <= 8 * slot_bytes + 4 * PAGE_BYTES
    pool.close()


def test_populating_one_rank_leaves_memory_for_the_others() -> None:
    pool = Pool(8 * PAGE_BYTES, transfer_ratio=1.0)
    layouts = [replace(hybrid(slot_bytes=PAGE_BYTES), shard=Shard(rank, 2)) for rank in range(2)]
    for arena in [pool.arena(layout) for layout in layouts]:
        taken = pool.take_unbacked(arena, 8 * PAGE_BYTES, max_ratio=0.5)
        arena.populate_later(taken)()
        pool.put_back(arena, taken)
        assert taken == range(4) and not pool.take_unbacked(arena, 1, max_ratio=0.5)
    check_integrity(pool)
    assert pool.stats().slots_by_kind["free"] == 8
    pool.close()


def test_a_late_reader_notices_that_a_slots_memory_is_gone() -> None:
    pool = Pool(8 * SLOT_BYTES, transfer_ratio=1.0)
    first, second = (pool.arena(hybrid(model)) for model in ("first", "second"))
    lease = pool.open_lease()
    read = pool.allocate(first, 0, 8, lease)
    assert read is not None
    generations = [first.generation(slot) for slot in read]
    pool.end_lease(lease)
    assert [first.generation(slot) for slot in read] == generations
    assert pool.allocate(second, 0, 8, pool.open_lease()) is not None
    assert all(first.generation(slot) > then for slot, then in zip(read, generations, strict=True))
    pool.close()


class _Stubborn(Arena):
    """Arena whose memory the system does not take back."""

    def give_back(self, slots: Iterable[int]) -> None:
        raise OSError("not supported")


def test_memory_that_the_system_refuses_stays_with_its_free_slots() -> None:
    pool: SlotPool[Arena] = SlotPool(8 * SLOT_BYTES, transfer_ratio=1.0, make_arena=_Stubborn)
    first, second = pool.arena(hybrid("a")), pool.arena(hybrid("b"))
    lease = pool.open_lease()
    assert pool.allocate(first, 0, 8, lease) is not None
    pool.end_lease(lease)
    lease = pool.open_lease()
    with pytest.raises(OSError, match="not supported"):
        pool.allocate(second, 0, 1, lease)
    check_integrity(pool)
    assert pool.allocate(first, 0, 8, lease) is not None
    pool.close()


def _used_bytes(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_an_empty_arena_is_dropped(node: Node) -> None:
    second = node.pool.arena(hybrid("other"))
    lease = node.pool.open_lease()
    node.pool.allocate(second, 0, 2, lease)
    assert not node.pool.drop(second.layout.fingerprint)
    node.pool.quarantine(lease)
    assert not node.pool.drop(second.layout.fingerprint)
    node.pool.end_lease(lease)
    assert node.pool.drop(second.layout.fingerprint)
    assert node.pool.arenas == [node.arena]


def test_an_arena_with_prefix_blocks_is_not_dropped(node: Node) -> None:
    first, second = node.pool.arena(hybrid("first")), node.pool.arena(hybrid("second"))
    node.keep(1, 2)
    lease = node.pool.open_lease()
    taken = node.pool.allocate(second, 0, 1, lease)
    assert taken is not None
    node.pool.publish(second, taken[0], BlockIdentity(ATTENTION, name(7), ROOT, 32, ROOT))
    node.pool.end_lease(lease)
    assert node.pool.drop(first.layout.fingerprint)
    assert not node.pool.drop(second.layout.fingerprint)
    assert not node.pool.drop(node.arena.layout.fingerprint)
    node.pool.arena(hybrid("third"))
    node.pool.forget("second")
    assert node.holds(1, 2) == [1, 2]
    assert node.pool.drop(second.layout.fingerprint)
