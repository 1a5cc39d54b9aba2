"""Random histories of pieces, which take a slot, and states, which take a row: no block overwrites another."""

import os
import random
from pathlib import Path

import pytest

from prfaas.cachepool.arena import MAX_SLOTS_PER_ROW, Arena, shape_of
from prfaas.cachepool.block_run import BlockIdentity
from prfaas.cachepool.file_arena import FileArena
from prfaas.cachepool.pool import Pool, SlotPool
from prfaas.cachepool.slots import LeaseId
from prfaas.types import BlockHash
from tests.support.pool_integrity import check_integrity
from tests.support.pool_layouts import ROOT, SLOT_BYTES, divided, name

PIECES, STATES = 0, 1
NUM_SLOTS, NUM_STEPS = 64, 300
HEADER_BYTES = 4096


class History:
    """Blocks with contents of their own, and the leases of those in use."""

    def __init__(self, seed: int, *, is_pinned: bool) -> None:
        self.rng = random.Random(seed)
        self.layout = divided(slots_per_state=self.rng.randrange(2, 6))
        self.pool = Pool(NUM_SLOTS * SLOT_BYTES)
        self.arena = self.pool.arena(self.layout)
        self.arena.pinned = is_pinned
        self.leases: list[LeaseId] = []
        self.stored: dict[tuple[int, BlockHash], tuple[int, int]] = {}  # Slot and generation.
        self._number = 0

    def store(self) -> None:
        """Store some pieces in a chain, or a state."""
        group = self.rng.choice([PIECES, PIECES, STATES])
        lease = self.pool.open_lease()
        slots = self.pool.allocate(self.arena, group, 1 if group == STATES else self.rng.randrange(6), lease)
        parent = ROOT
        for count, slot in enumerate(slots or ()):
            self._number += 1
            block = BlockIdentity(group, name(self._number), parent, 32 * (count + 1), parent)
            self._write(slot, block)
            if self.pool.publish(self.arena, slot, block):
                self.stored[group, block.block_hash] = slot, self.arena.generation(slot)
            parent = block.block_hash
        self.leases.append(lease)

    def _write(self, slot: int, block: BlockIdentity) -> None:
        view = self.arena.slot_view(slot, block.group)
        view[:] = block.block_hash * (len(view) // len(block.block_hash))

    def end(self) -> None:
        if self.leases:
            self.pool.end_lease(self.leases.pop(self.rng.randrange(len(self.leases))))

    def forget(self) -> None:
        if self.rng.random() < 0.1:
            self.pool.forget(self.layout.model)

    def check(self) -> None:
        check_integrity(self.pool)
        for (group, block_hash), (slot, generation) in self.stored.items():
            view = self.arena.slot_view(slot, group)
            is_intact = view == block_hash * (len(view) // len(block_hash))
            is_current = self.arena.generation(slot) == generation
            assert is_intact or not is_current, "a late reader does not notice another block"
            if (found := self.pool.find(self.arena, group, block_hash)) is not None:
                assert is_intact and is_current and found == slot, "a block was overwritten"


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_blocks_keep_their_bytes_and_memory_its_budget(seed: int, is_pinned: bool) -> None:
    history = History(seed, is_pinned=is_pinned)
    for _ in range(NUM_STEPS):
        history.rng.choice([history.store, history.store, history.end, history.end, history.forget])()
        history.check()
        used = os.fstat(history.arena.fd).st_blocks * 512
        assert used <= NUM_SLOTS * SLOT_BYTES + HEADER_BYTES
    while history.leases:
        history.end()
    history.pool.forget(history.layout.model)
    check_integrity(history.pool)
    assert history.pool.drop(history.layout.fingerprint), "a slot of an empty arena is in use"
    history.pool.close()


def test_scattered_free_slots_do_not_keep_a_row_from_a_state() -> None:
    """Every second piece is in use at first, so that no row is free although half of the slots are."""
    pool = Pool(2 * 16 * SLOT_BYTES)
    arena = pool.arena(divided(slots_per_state=4))
    arena.pinned = True
    _scatter(pool, arena, range(1, 17))
    lease = pool.open_lease()
    assert pool.allocate(arena, STATES, 4, lease) is not None
    pool.end_lease(lease)
    _scatter(pool, arena, range(17, 49))
    assert pool.stats().slots_by_kind["prefix"] == 16
    lease = pool.open_lease()
    assert pool.allocate(arena, STATES, 4, lease) is not None, "no row was made free"
    check_integrity(pool)
    pool.end_lease(lease)
    pool.close()


def test_a_huge_state_beside_tiny_pieces_makes_no_huge_row() -> None:
    shape = shape_of(divided(slots_per_state=1 << 20))
    assert shape.slots_per_row <= MAX_SLOTS_PER_ROW and shape.row_bytes >= (1 << 20) * SLOT_BYTES - 100


def _scatter(pool: Pool, arena: Arena, numbers: range) -> None:
    """Fill slots with pieces, of which every second one leaves at once."""
    leases = pool.open_lease(), pool.open_lease()
    for number in numbers:
        taken = pool.allocate(arena, PIECES, 1, leases[number % 2])
        if taken is None:
            break
        if number % 2:
            pool.publish(arena, taken[0], BlockIdentity(PIECES, name(number), ROOT, 32, ROOT))
    for lease in leases:
        pool.end_lease(lease)


@pytest.mark.parametrize("num_slots", [16, 32, 8])
def test_files_of_another_size_keep_rows_and_pieces(tmp_path: Path, num_slots: int) -> None:
    """The budget of an SSD may change between two lives."""
    layout = divided(slots_per_state=4)
    blocks = {4: BlockIdentity(STATES, name(1), ROOT, 32, ROOT), 2: BlockIdentity(PIECES, name(2), ROOT, 32, ROOT)}
    blocks |= {9: BlockIdentity(PIECES, name(3), name(2), 64, name(2))}
    first = FileArena(layout, 16, directory=tmp_path)
    memory = Arena(layout, 16)
    for slot, block in blocks.items():
        view = memory.slot_view(slot, block.group)
        view[:] = block.block_hash * (len(view) // 16)
        first.write(slot, view, block)
    first.close()

    pool: SlotPool[FileArena] = SlotPool(
        num_slots * SLOT_BYTES,
        transfer_ratio=0.1,
        tier="ssd",
        make_arena=lambda layout, number: FileArena(layout, number, directory=tmp_path),
    )
    arena = pool.arena(layout)
    assert arena.num_slots == num_slots
    pool.restore(arena, arena.blocks())
    check_integrity(pool)
    kept = {slot: block for slot, block in blocks.items() if slot < num_slots}
    assert {slot: pool.identity(arena, slot) for slot in kept} == kept
    for slot, block in kept.items():
        into = memory.slot_view(0, block.group)
        assert arena.read(slot, into) and bytes(into[:16]) == block.block_hash
    pool.close()
    memory.close()


def test_a_record_that_overlaps_another_is_left_out(tmp_path: Path) -> None:
    """A power loss may keep a record that was emptied before its row was split."""
    layout = divided(slots_per_state=4)
    arena, memory = FileArena(layout, 16, directory=tmp_path), Arena(layout, 16)
    arena.write(4, memory.slot_view(4, STATES), BlockIdentity(STATES, name(1), ROOT, 32, ROOT))
    arena.write(6, memory.slot_view(6, PIECES), BlockIdentity(PIECES, name(2), ROOT, 32, ROOT))
    arena.write(8, memory.slot_view(8, PIECES), BlockIdentity(PIECES, name(3), ROOT, 32, ROOT))
    assert set(arena.blocks()) == {4, 8}
    arena.close()
    memory.close()
