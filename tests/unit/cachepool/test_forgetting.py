"""Forgetting a model: nobody finds its blocks any more, and their slots are free once their uses end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prfaas.cachepool.block_run import BlockIdentity
from prfaas.cachepool.capacity import TenantShares
from prfaas.cachepool.file_arena import FileArena
from prfaas.cachepool.pool import Pool, SlotPool
from prfaas.cachepool.removal import removal
from prfaas.cachepool.slots import LeaseId
from prfaas.pool_events import BlockRemoved, BlocksStored, PoolChange
from tests.support.pool_integrity import check_integrity
from tests.support.pool_layouts import ROOT, SLOT_BYTES, hybrid, name
from tests.unit.cachepool.test_pool import ATTENTION, STATE, Node

MODEL = "hybrid"


def _written(node: Node, *numbers: int) -> tuple[LeaseId, list[int]]:
    """Blocks that somebody writes, and still may once they are published."""
    lease = node.pool.open_lease("writer")
    slots = node.pool.allocate(node.arena, len(numbers), lease)
    assert slots is not None
    return lease, slots


def _publish(node: Node, slot: int, number: int) -> bool:
    return node.pool.publish(node.arena, slot, BlockIdentity(ATTENTION, name(number), ROOT, 32, ROOT))


def test_forgetting_a_model_removes_all_its_blocks_and_no_others() -> None:
    node = Node()
    node.keep(1, 2, 3)
    node.keep(4, parent=2)
    node.keep(3, parent=3, group=STATE)
    second = node.pool.arena(hybrid("other"))
    lease = node.pool.open_lease("test")
    taken = node.pool.allocate(second, 1, lease)
    assert taken is not None
    node.pool.publish(second, taken[0], BlockIdentity(ATTENTION, name(1), ROOT, 32, ROOT))
    node.pool.end_lease(lease)
    assert node.pool.forget(MODEL) == 5 * SLOT_BYTES
    check_integrity(node.pool)
    assert node.holds(1, 2, 3, 4) == node.holds(3, group=STATE) == []
    assert node.pool.find(second, ATTENTION, name(1)) == taken[0]
    assert node.pool.stats().slots_by_kind == {"prefix": 1, "transfer": 0, "quarantined": 0, "free": 5}
    removed = [event for event in node.events if isinstance(event, BlockRemoved)]
    assert {event.layout for event in removed} == {node.arena.layout.fingerprint}
    assert len(removed) == 5


class CountingArena(FileArena):
    """Counts the slots that are emptied."""

    num_emptied = 0

    def bump(self, slots: Iterable[int]) -> None:
        emptied = list(slots)
        self.num_emptied += len(emptied)
        super().bump(emptied)


def test_forgetting_empties_each_ssd_slot_once(tmp_path: Path) -> None:
    pool: SlotPool[CountingArena] = SlotPool(
        64 << 20, tier="ssd", make_arena=lambda layout, num_slots: CountingArena(layout, num_slots, directory=tmp_path)
    )
    arena = pool.arena(hybrid(MODEL))
    lease = pool.open_lease("writer")
    slots = pool.allocate(arena, 600, lease)
    assert slots is not None
    hashes = [name(number) for number in range(1, 601)]
    pool.publish_run(arena, slots, group=ATTENTION, hashes=hashes, parent=ROOT, num_tokens=32)
    pool.end_lease(lease)
    before = arena.num_emptied
    pool.forget(MODEL)
    assert arena.num_emptied - before == 600
    check_integrity(pool)
    pool.close()


def test_a_forgotten_block_keeps_its_slot_until_its_reader_ends() -> None:
    node = Node()
    node.keep(1, 2, 3)
    slots = [node.slot(number) for number in (1, 2)]
    first, second = node.pool.open_lease("reader"), node.pool.open_lease("reader")
    node.pool.pin(node.arena, slots, first)
    node.pool.pin(node.arena, slots[:1], second)
    generations = [node.arena.generation(slot) for slot in slots]
    node.pool.forget(MODEL)
    node.pool.forget(MODEL)
    assert node.holds(1, 2, 3) == []
    assert node.pool.stats().slots_by_kind == {"prefix": 0, "transfer": 0, "quarantined": 2, "free": 1}
    assert [node.arena.generation(slot) for slot in slots] == generations
    check_integrity(node.pool)
    node.pool.end_lease(first)
    assert node.pool.stats().slots_by_kind == {"prefix": 0, "transfer": 0, "quarantined": 1, "free": 2}
    check_integrity(node.pool)
    node.pool.end_lease(second)
    assert node.pool.stats().slots_by_kind == {"prefix": 0, "transfer": 0, "quarantined": 0, "free": 3}
    assert node.arena.generation(slots[0]) > generations[0]
    check_integrity(node.pool)
    assert [event.block_hash for event in node.events if isinstance(event, BlockRemoved)] == [name(3), name(2), name(1)]


def test_a_block_forgotten_while_written_is_never_published() -> None:
    node = Node()
    lease, slots = _written(node, 1, 2)
    assert _publish(node, slots[0], 1)
    node.pool.forget(MODEL)
    assert not _publish(node, slots[1], 2)
    node.pool.publish_run(
        node.arena, slots[1:], group=ATTENTION, hashes=[name(2)], parent=name(1), num_tokens=64, root=ROOT
    )
    assert node.holds(1, 2) == []
    assert node.pool.stats().slots_by_kind == {"prefix": 0, "transfer": 1, "quarantined": 1, "free": 0}
    check_integrity(node.pool)
    node.pool.end_lease(lease)
    assert node.pool.stats().slots_by_kind == {"prefix": 0, "transfer": 0, "quarantined": 0, "free": 2}
    check_integrity(node.pool)


def test_forgotten_blocks_can_be_stored_again_while_still_read() -> None:
    node = Node()
    node.keep(1, 2)
    former = node.slot(2)
    reading = node.pool.open_lease("reader")
    node.pool.pin(node.arena, [node.slot(1), former], reading)
    node.pool.forget(MODEL)
    node.keep(1, 2, 3)
    assert node.holds(1, 2, 3) == [1, 2, 3]
    assert node.slot(2) != former
    node.pool.end_lease(reading)
    check_integrity(node.pool)
    assert node.holds(1, 2, 3) == [1, 2, 3]


def test_a_forgotten_orphan_does_not_hang_on_a_later_parent() -> None:
    node = Node()
    node.keep(3, parent=2)
    reading = node.pool.open_lease("reader")
    node.pool.pin(node.arena, [node.slot(3)], reading)
    node.pool.forget(MODEL)
    node.keep(2)
    assert node.pool.cut(removal(node.pool.tables, name(2))) == SLOT_BYTES
    node.pool.end_lease(reading)
    check_integrity(node.pool)


def test_forgetting_frees_the_tenants_room() -> None:
    changes: list[PoolChange] = []
    pool = Pool(8 * SLOT_BYTES, shares=TenantShares(each_tenant=0.5), on_change=changes.append)
    arena = pool.arena(hybrid())
    for _ in range(2):
        lease = pool.open_lease("test")
        slots = pool.allocate(arena, 2, lease)
        assert slots is not None
        for number, slot in enumerate(slots, 1):
            pool.publish(arena, slot, BlockIdentity(ATTENTION, name(number), ROOT, 32, ROOT, ROOT))
        pool.end_lease(lease)
        assert pool.stats().tenant_bytes == {ROOT.hex(): 2 * SLOT_BYTES}
        pool.forget(MODEL)
        assert pool.stats().tenant_bytes == {ROOT.hex(): 0}
        check_integrity(pool)
    assert sum(isinstance(change, BlocksStored) for change in changes) == 4
    pool.close()
