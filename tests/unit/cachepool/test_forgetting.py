"""Forgetting a model: nobody finds its blocks any more, and their slots are free once their uses end."""

from collections.abc import Iterable
from pathlib import Path

from prfaas.cachepool.block_run import BlockIdentity
from prfaas.cachepool.file_arena import FileArena
from prfaas.cachepool.pool import SlotPool
from prfaas.pool_events import BlockRemoved
from tests.support.pool_integrity import check_integrity
from tests.support.pool_layouts import ROOT, SLOT_BYTES, hybrid, name
from tests.unit.cachepool.test_pool import ATTENTION, STATE, Node

MODEL = "hybrid"


def test_forgetting_a_model_removes_all_its_blocks_and_no_others() -> None:
    node = Node()
    node.keep(1, 2, 3)
    node.keep(4, parent=2)
    node.keep(3, parent=3, group=STATE)
    second = node.pool.arena(hybrid("other"))
    lease = node.pool.open_lease()
    taken = node.pool.allocate(second, 0, 1, lease)
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
    lease = pool.open_lease()
    slots = pool.allocate(arena, 0, 600, lease)
    assert slots is not None
    hashes = [name(number) for number in range(1, 601)]
    pool.publish_run(arena, slots, group=ATTENTION, hashes=hashes, parent=ROOT, num_tokens=32)
    pool.end_lease(lease)
    before = arena.num_emptied
    pool.forget(MODEL)
    assert arena.num_emptied - before == 600
    check_integrity(pool)
    pool.close()
