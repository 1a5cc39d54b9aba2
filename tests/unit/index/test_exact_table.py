"""Checkpoints by exact length: found by hash and length together, counted by holder, gone with the last one."""

import random

import pytest

from prfaas.hashing import HashChain, root_hash
from prfaas.index.memory.exact_table import ExactTable
from prfaas.index.query import chain_of
from prfaas.types import BlockHash

CHAIN = HashChain(root_hash("m"), list(range(640)))
UNITS = chain_of(b"".join(CHAIN.units), 16)


def store(table: ExactTable, holder: int, length: int) -> bool:
    return table.store(holder, block_hash=CHAIN.at(length), anchor=CHAIN.at(length - length % 16), num_tokens=length)


def holders_of(table: ExactTable, block_hash: BlockHash, num_tokens: int) -> tuple[int, ...]:
    return tuple(table.held(UNITS, 0, stated=[(num_tokens, block_hash)])[1])


def test_a_checkpoint_is_found_only_at_its_length() -> None:
    table = ExactTable()
    assert store(table, 3, 160)
    assert holders_of(table, CHAIN.at(160), 160) == (3,)
    assert holders_of(table, CHAIN.at(160), 176) == ()
    assert holders_of(table, CHAIN.at(176), 160) == ()
    assert table.store(4, block_hash=CHAIN.at(160), anchor=CHAIN.at(160), num_tokens=176)
    assert holders_of(table, CHAIN.at(160), 160) == (3,)


def test_two_hashes_with_the_same_first_half_are_told_apart() -> None:
    table = ExactTable()
    store(table, 3, 160)
    twin = BlockHash(CHAIN.at(160)[:8] + bytes(8))
    assert holders_of(table, twin, 160) == ()
    assert not table.remove(3, block_hash=twin, num_tokens=160)
    forged = chain_of(UNITS.hashes[: 9 * 16] + twin + UNITS.hashes[160:], 16)
    assert table.held(forged, 40) == ([], {})
    assert table.held(UNITS, 40) == ([160], {3: 1})


def test_holders_have_bitmaps_over_all_lengths() -> None:
    table = ExactTable()
    for holder, length in ((1, 160), (2, 160), (1, 320), (2, 33), (3, 640), (4, 33)):
        store(table, holder, length)
    stated = [(33, CHAIN.at(33)), (160, CHAIN.at(160)), (35, CHAIN.at(35))]
    assert table.held(UNITS, 30, stated=stated) == ([33, 160, 320], {1: 0b110, 2: 0b011, 4: 0b001})


def test_a_checkpoint_goes_with_its_last_holder() -> None:
    table, chance = ExactTable(), random.Random(2)
    held = [(holder, length) for holder in range(5) for length in (7, 16, 33, 160, 161, 640)]
    for holder, length in held:
        assert store(table, holder, length)
        assert not store(table, holder, length)
    chance.shuffle(held)
    for number, (holder, length) in enumerate(held):
        assert sum(len(entry.holders) for entry in table) == len(held) - number
        assert table.remove(holder, block_hash=CHAIN.at(length), num_tokens=length)
        assert not table.remove(holder, block_hash=CHAIN.at(length), num_tokens=length)
    assert len(table) == 0
    assert table.odd_lengths(UNITS, 40) == []


def test_odd_lengths_are_found_by_their_anchor() -> None:
    table = ExactTable()
    for length in (33, 40, 161):
        store(table, 1, length)
    assert table.odd_lengths(UNITS, 40) == [33, 40, 161]
    assert table.odd_lengths(UNITS, 5) == [33, 40]
    fork = b"".join(HashChain(root_hash("m"), list(range(32)) + [9] * 600).units)
    assert table.odd_lengths(chain_of(fork, 16), 37) == [33, 40]


def test_an_odd_length_lasts_until_its_last_checkpoint() -> None:
    table, anchor = ExactTable(), CHAIN.at(32)
    hashes = [BlockHash(bytes((number,)) * 16) for number in range(4)]
    for block_hash in hashes:
        table.store(1, block_hash=block_hash, anchor=anchor, num_tokens=40)
    for block_hash in hashes:
        assert table.odd_lengths(UNITS, 40) == [40]
        assert table.remove(1, block_hash=block_hash, num_tokens=40)
    assert table.odd_lengths(UNITS, 40) == []


def test_a_sweep_forgets_only_dead_holders() -> None:
    table = ExactTable()
    for holder in (1, 2, 3):
        store(table, holder, 160)
    store(table, 2, 33)
    assert sum(table.sweep(lambda holder: holder == 3)) == 1
    assert holders_of(table, CHAIN.at(160), 160) == (3,)
    assert [entry.num_tokens for entry in table] == [160]


def test_a_large_table_may_change_between_sweep_steps() -> None:
    table = ExactTable()
    hashes = [BlockHash(number.to_bytes(16, "little")) for number in range(1000)]
    for block_hash in hashes:
        table.store(1, block_hash=block_hash, anchor=block_hash, num_tokens=160)
    steps = table.sweep(lambda holder: False)
    dropped = next(steps)
    assert 0 < dropped < 100
    gone = sum(table.remove(1, block_hash=block_hash, num_tokens=160) for block_hash in hashes[500:])
    assert dropped + gone + sum(steps) == 1000
    assert len(table) == 0


@pytest.mark.parametrize("seed", range(5))
def test_an_export_during_changes_was_true_at_some_moment(seed: int) -> None:
    table, chance = ExactTable(), random.Random(seed)
    lengths = range(16, 336, 16)
    ever = {(holder, length) for length in lengths for holder in chance.sample(range(6), 2)}
    for holder, length in sorted(ever):
        store(table, holder, length)
    for entry in table:
        assert {(holder, entry.num_tokens) for holder in entry.holders} <= ever
        for _ in range(4):
            holder, length = chance.randrange(6), chance.choice(lengths)
            if chance.random() < 0.6:
                table.remove(holder, block_hash=CHAIN.at(length), num_tokens=length)
            elif store(table, holder, length):
                ever.add((holder, length))
