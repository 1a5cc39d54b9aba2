"""The inventory: paths, orphans, digests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace
from typing import Any, ClassVar

import pytest

from prfaas.errors import IndexRefusal
from prfaas.index.inventory import Inventory
from prfaas.index.segments import TAIL_BYTES, Segment
from prfaas.pool_events import POOL_TIERS, BlockRemoved, BlocksRemoved, BlocksStored, BlockStored, PoolChange, Tier
from prfaas.types import BlockHash
from tests.unit.index.test_index import DENSE, LONG, blocks


def inventory() -> Inventory:
    made = Inventory()
    made.add_layout(DENSE)
    return made


def test_a_prompt_becomes_one_segment_per_cell_of_64_blocks() -> None:
    told = inventory().apply(blocks(DENSE, range(130 * 16)))
    segments = [its for its in told if isinstance(its, Segment)]
    assert sorted(len(segment.tails) // TAIL_BYTES for segment in segments) == [2, 64, 64]
    assert {segment.head for segment in segments} == {LONG.at(16), LONG.at(65 * 16), LONG.at(129 * 16)}


def test_a_later_block_is_told_with_its_path_and_only_its_own_bit() -> None:
    its = inventory()
    its.apply(blocks(DENSE, range(160)))
    (segment,) = its.apply(blocks(DENSE, range(160, 176)))
    assert isinstance(segment, Segment)
    assert (segment.head, len(segment.tails), segment.bitmap) == (LONG.at(16), 11 * TAIL_BYTES, 1 << 10)


def test_a_block_without_a_known_parent_waits_for_it_untold() -> None:
    its = inventory()
    assert its.apply(blocks(DENSE, range(160, 176))) == []
    assert its.num_orphans == 1
    assert its.digests() == {}
    (segment,) = its.apply(blocks(DENSE, range(160)))
    assert isinstance(segment, Segment)
    assert segment.bitmap == (1 << 11) - 1
    assert its.num_orphans == 0


def test_an_orphan_that_is_removed_is_forgotten() -> None:
    its = inventory()
    its.apply(blocks(DENSE, range(160, 176)))
    its.apply([BlockRemoved(DENSE.fingerprint, 0, LONG.at(176))])
    assert its.num_orphans == 0


class Watched(BlockStored):
    """A block that notes what is read of it."""

    num_reads: ClassVar[int] = 0

    def __getattribute__(self, name: str) -> Any:
        Watched.num_reads += 1
        return super().__getattribute__(name)


def test_to_remove_an_orphan_looks_at_no_other_one() -> None:
    its, orphans = inventory(), blocks(DENSE, range(160, 1600))
    its.apply([Watched(*astuple(orphan)) for orphan in orphans])
    Watched.num_reads = 0
    its.apply([BlockRemoved(DENSE.fingerprint, 0, LONG.at(end)) for end in range(800, 1601, 16)])
    assert (its.num_orphans, Watched.num_reads) == (39, 0)


def test_an_orphan_that_is_told_twice_is_one_and_waits_for_the_parent_told_last() -> None:
    its = inventory()
    orphan = BlockStored(DENSE.fingerprint, 0, LONG.at(176), LONG.at(160), 176)
    its.apply([replace(orphan, parent=BlockHash(b"\1" * 16)), orphan])
    assert its.num_orphans == 1
    (segment,) = its.apply(blocks(DENSE, range(160)))
    assert isinstance(segment, Segment)
    assert segment.bitmap == (1 << 11) - 1
    assert its.num_orphans == 0


def test_a_block_whose_parent_went_is_still_told_with_its_whole_path() -> None:
    its = inventory()
    its.apply(blocks(DENSE, range(160)))
    its.apply([BlockRemoved(DENSE.fingerprint, 0, LONG.at(80))])
    (segment,) = its.everything()
    assert isinstance(segment, Segment)
    assert len(segment.tails) == 10 * TAIL_BYTES
    assert segment.bitmap == (1 << 10) - 1 - (1 << 4)


def test_nothing_is_left_when_all_is_removed() -> None:
    its = inventory()
    its.apply(blocks(DENSE, range(3200)))
    its.apply([BlockRemoved(DENSE.fingerprint, 0, LONG.at(end)) for end in range(16, 3201, 16)])
    its.apply([run(0, 200), run(100, 200, tier="ssd")])
    tiers: list[tuple[Tier, int]] = [("memory", 0), ("ssd", 100)]
    for tier, first in tiers:
        its.apply([BlocksRemoved(DENSE.fingerprint, 0, run(first, 200).hashes, tier)])
    assert its.everything() == []
    assert its.digests() == {}
    assert not any(map(len, its._ancestry.values()))


def test_a_block_in_the_wrong_place_of_its_chain_is_refused_and_counted() -> None:
    its = inventory()
    its.apply(blocks(DENSE, range(32)))
    told = its.apply([BlockStored(DENSE.fingerprint, 0, LONG.at(160), LONG.at(16), 160)])
    assert told == []
    assert its.num_refused == 1


def test_events_of_an_unknown_layout_are_refused() -> None:
    with pytest.raises(IndexRefusal) as refusal:
        inventory().apply([BlockStored(bytes(16), 0, LONG.at(16), LONG.root, 16)])
    assert refusal.value.reason == "unknown_layout"


def run(first: int, end: int, *, tier: Tier = "memory") -> BlocksStored:
    """Blocks `first` to `end` of LONG as one change."""
    hashes = tuple(LONG.at(16 * block) for block in range(first + 1, end + 1))
    return BlocksStored(DENSE.fingerprint, 0, hashes, LONG.at(16 * first), 16 * (first + 1), 16, tier)


def test_a_run_is_told_like_its_blocks() -> None:
    as_one, one_by_one = inventory(), inventory()
    stored = [run(0, 150), run(150, 170), run(160, 180), run(60, 90, tier="ssd"), run(200, 200), run(190, 200)]
    removed = [run(140, 160).hashes, (LONG.at(3200),)]
    changes: list[PoolChange] = [*stored, *(BlocksRemoved(DENSE.fingerprint, 0, hashes) for hashes in removed)]
    for change in changes:
        assert as_one.apply([change]) == one_by_one.apply(list(change.each()))
        assert (as_one.digests(), as_one.num_orphans) == (one_by_one.digests(), one_by_one.num_orphans)
    assert as_one.everything() == one_by_one.everything()


def test_a_run_in_the_wrong_place_is_refused_like_its_blocks() -> None:
    its = inventory()
    its.apply([run(0, 10)])
    assert its.apply([replace(run(10, 12), num_tokens=16 * 13)]) == []
    assert its.num_refused == 1


class AsOne(BlocksStored):
    """A run that nobody may take block by block."""

    def each(self) -> Iterator[BlockStored]:
        raise AssertionError("an object for each block")


def as_one(its: BlocksStored) -> AsOne:
    return AsOne(its.layout, its.group, its.hashes, its.parent, its.num_tokens, its.block_tokens, its.tier)


def test_a_run_whose_blocks_another_tier_holds_is_taken_as_one() -> None:
    its, one_by_one = inventory(), inventory()
    for change in (run(0, 150), run(20, 90, tier="ssd"), run(10, 30, tier="ssd")):
        assert its.apply([as_one(change)]) == one_by_one.apply(list(change.each()))
    for tier in POOL_TIERS:
        for of_two in (its, one_by_one):
            of_two.apply([BlocksRemoved(DENSE.fingerprint, 0, run(20, 80).hashes, tier)])
    assert its.digests() == one_by_one.digests()
    assert its.everything() == one_by_one.everything()


def test_a_run_is_taken_as_one_while_blocks_of_another_chain_wait_for_their_parent() -> None:
    its = inventory()
    its.apply([BlockStored(DENSE.fingerprint, 0, BlockHash(bytes(32)), BlockHash(b"\1" * 32), 160)])
    (segment,) = its.apply([as_one(run(0, 20))])
    assert isinstance(segment, Segment)
    assert segment.bitmap == (1 << 20) - 1
    assert its.num_orphans == 1


def test_a_run_that_has_the_parent_that_a_block_waits_for_brings_that_block_too() -> None:
    its = inventory()
    its.apply([run(20, 30)])
    (segment,) = its.apply([run(0, 20)])
    assert isinstance(segment, Segment)
    assert segment.bitmap == (1 << 30) - 1
    assert its.num_orphans == 0
