"""Table of runs: packed holders, and runs that go with their last holder."""

import random

from prfaas.index.memory import run_table
from prfaas.index.memory.run_table import RunTable
from prfaas.index.segments import CELL_BLOCKS, TAIL_BYTES
from prfaas.types import BlockHash

MANY = 2000  # Chats that share a cell; beyond 32, a block is not found by a search of all.


def tails_of(rng: random.Random, num_blocks: int) -> bytes:
    return rng.randbytes(num_blocks * TAIL_BYTES)


def whole(tails: bytes) -> int:
    return (1 << len(tails) // TAIL_BYTES) - 1


def test_a_run_leaves_out_holders_beyond_its_maximum() -> None:
    tails = bytes(8)
    full = run_table.pack_holders((holder, 1) for holder in range(run_table.MAX_HOLDERS))
    assert run_table.split(run_table.pack(full, tails)) == (full, tails)
    assert run_table.with_bits(full, run_table.MAX_HOLDERS, 1) == (full, 0)
    changed, new = run_table.with_bits(full, 7, 2)
    assert new == 2 and dict(run_table.unpack_holders(changed))[7] == 3
    fewer, gone = run_table.without_bits(full, 7, 1)
    assert gone == 1
    refilled, new = run_table.with_bits(fewer, run_table.MAX_HOLDERS, 1)
    assert new == 1 and run_table.split(run_table.pack(refilled, tails)) == (refilled, tails)


def test_holders_stay_sorted_under_random_changes() -> None:
    rng, packed, model = random.Random(1), b"", dict[int, int]()
    for _ in range(3000):
        holder, bits = rng.randrange(40), rng.getrandbits(CELL_BLOCKS)
        if rng.random() < 0.5:
            packed, changed = run_table.with_bits(packed, holder, bits)
            assert changed == bits & ~model.get(holder, 0)
            model[holder] = model.get(holder, 0) | bits
        else:
            packed, changed = run_table.without_bits(packed, holder, bits)
            assert changed == bits & model.get(holder, 0)
            model[holder] = model.get(holder, 0) & ~bits
        assert run_table.unpack_holders(packed) == sorted(item for item in model.items() if item[1])


def test_a_run_goes_with_its_last_block() -> None:
    rng, table = random.Random(2), RunTable()
    for _ in range(500):
        tails = tails_of(rng, CELL_BLOCKS)
        head = BlockHash(tails[:TAIL_BYTES] + rng.randbytes(8))
        table.store(1, head=head, tails=tails, bitmap=whole(tails))
        table.remove(1, head=head, tails=tails, bitmap=whole(tails))
    assert len(table) == 0


def test_a_run_stays_while_forks_depend_on_it() -> None:
    rng, table = random.Random(3), RunTable()
    common = tails_of(rng, 10)
    head = BlockHash(common[:TAIL_BYTES] + rng.randbytes(8))
    first, second = (common + tails_of(rng, 20) for _ in range(2))
    deeper = second[: 15 * TAIL_BYTES] + tails_of(rng, 9)
    for tails in (first, second, deeper):
        table.store(1, head=head, tails=tails, bitmap=whole(tails))
    assert len(table) == 3
    table.remove(1, head=head, tails=first, bitmap=whole(first))
    table.remove(1, head=head, tails=second, bitmap=whole(second))
    assert len(table) == 3, "the deepest run is found through both"
    path, holders = next(table.path(*key) for key in table.runs() if table.path(*key)[1])
    assert path == deeper and holders == [(1, whole(deeper) & ~whole(second[: 15 * TAIL_BYTES]))]
    table.remove(1, head=head, tails=deeper, bitmap=whole(deeper))
    assert len(table) == 0


def test_a_step_of_the_sweep_visits_one_run_of_a_shared_cell() -> None:
    rng, table = random.Random(4), RunTable()
    common = tails_of(rng, 10)
    head = BlockHash(common[:TAIL_BYTES] + rng.randbytes(8))
    for _ in range(MANY):
        tails = common + tails_of(rng, 3)
        table.store(1, head=head, tails=tails, bitmap=whole(tails))
    dropped = [table.sweep(*key, lambda holder: False) for key in table.runs()]
    assert sum(dropped) == MANY and max(dropped) <= 2 and len(table) == 0


def test_every_mark_in_a_shared_cell_is_found_again() -> None:
    rng, table = random.Random(5), RunTable()
    common = tails_of(rng, 10)
    head = BlockHash(common[:TAIL_BYTES] + rng.randbytes(8))
    chats = [common + tails_of(rng, 3) for _ in range(MANY)]
    for tails in chats:
        table.store(1, head=head, tails=tails, bitmap=whole(tails))
        assert table.store_marks(2, head=head, tails=tails, bitmap=1 << 12).num_blocks == 1
    for tails in chats:
        table.remove(1, head=head, tails=tails, bitmap=whole(tails))
        assert table.unmark(2, head=head, offset=12, tail=tails[12 * TAIL_BYTES :])
    assert len(table) == 0 and not table._marks
