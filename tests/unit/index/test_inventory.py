"""The inventory: paths, orphans, digests."""

from collections.abc import Iterator
from dataclasses import astuple, replace
from typing import Any, ClassVar

import pytest

from prfaas.errors import IndexRefusal
from prfaas.index.inventory import Inventory
from prfaas.index.segments import TAIL_BYTES, Segment
from prfaas.pool_events import BlockRemoved, BlocksRemoved, BlocksStored, BlockStored, PoolChange, Tier
from prfaas.types import BlockHash
from tests.unit.index.test_index import DENSE, LONG, blocks


def inventory() -> Inventory:
    made = Inventory()
    made.add_layout(DENSE)
    return made


def test_a_prompt_becomes_one_segment_per_cell_of_64_blocks() -> None:
    told = inventory().apply(blocks(DENSE, range(130 * 16)))
    segments = [announcement for announcement in told if isinstance(announcement, Segment)]
    assert sorted(len(segment.tails) // TAIL_BYTES for segment in segments) == [2, 64, 64]
    assert {segment.head for segment in segments} == {LONG.at(16), LONG.at(65 * 16), LONG.at(129 * 16)}


def test_a_later_block_is_announced_with_its_path_and_its_own_bit() -> None:
    node = inventory()
    node.apply(blocks(DENSE, range(160)))
    (segment,) = node.apply(blocks(DENSE, range(160, 176)))
    assert isinstance(segment, Segment)
    assert (segment.head, len(segment.tails), segment.bitmap) == (LONG.at(16), 11 * TAIL_BYTES, 1 << 10)


def test_an_orphan_is_announced_with_its_parent() -> None:
    node = inventory()
    assert node.apply(blocks(DENSE, range(160, 176))) == []
    assert node.num_orphans == 1
    assert node.digests() == {}
    (segment,) = node.apply(blocks(DENSE, range(160)))
    assert isinstance(segment, Segment)
    assert segment.bitmap == (1 << 11) - 1
    assert node.num_orphans == 0


def test_a_removed_orphan_is_forgotten() -> None:
    node = inventory()
    node.apply(blocks(DENSE, range(160, 176)))
    node.apply([BlockRemoved(DENSE.fingerprint, 0, LONG.at(176))])
    assert node.num_orphans == 0


class Watched(BlockStored):
    """A block that notes what is read of it."""

    num_reads: ClassVar[int] = 0

    def __getattribute__(self, name: str) -> Any:
        Watched.num_reads += 1
        return super().__getattribute__(name)


def test_removing_an_orphan_touches_no_other_orphan() -> None:
    node, orphans = inventory(), blocks(DENSE, range(160, 1600))
    node.apply([Watched(*astuple(orphan)) for orphan in orphans])
    Watched.num_reads = 0
    node.apply([BlockRemoved(DENSE.fingerprint, 0, LONG.at(end)) for end in range(800, 1601, 16)])
    assert (node.num_orphans, Watched.num_reads) == (39, 0)


def test_a_repeated_orphan_waits_for_the_latest_parent() -> None:
    node = inventory()
    orphan = BlockStored(DENSE.fingerprint, 0, LONG.at(176), LONG.at(160), 176)
    node.apply([replace(orphan, parent=BlockHash(b"\1" * 16)), orphan])
    assert node.num_orphans == 1
    (segment,) = node.apply(blocks(DENSE, range(160)))
    assert isinstance(segment, Segment)
    assert segment.bitmap == (1 << 11) - 1
    assert node.num_orphans == 0


def test_a_block_whose_parent_was_removed_keeps_its_path() -> None:
    node = inventory()
    node.apply(blocks(DENSE, range(160)))
    node.apply([BlockRemoved(DENSE.fingerprint, 0, LONG.at(80))])
    (segment,) = node.everything()
    assert isinstance(segment, Segment)
    assert len(segment.tails) == 10 * TAIL_BYTES
    assert segment.bitmap == (1 << 10) - 1 - (1 << 4)


def test_removing_everything_leaves_nothing() -> None:
    node = inventory()
    node.apply(blocks(DENSE, range(3200)))
    node.apply([BlockRemoved(DENSE.fingerprint, 0, LONG.at(end)) for end in range(16, 3201, 16)])
    node.apply([run(0, 200), run(100, 200, tier="ssd")])
    tiers: list[tuple[Tier, int]] = [("memory", 0), ("ssd", 100)]
    for tier, first in tiers:
        node.apply([BlocksRemoved(DENSE.fingerprint, 0, run(first, 200).hashes, tier)])
    assert node.everything() == []
    assert node.digests() == {}
    assert not any(map(len, node._ancestry.values()))


def test_a_block_at_a_wrong_place_of_its_chain_is_refused() -> None:
    node = inventory()
    node.apply(blocks(DENSE, range(32)))
    told = node.apply([BlockStored(DENSE.fingerprint, 0, LONG.at(160), LONG.at(16), 160)])
    assert told == []
    assert node.num_refused == 1


def test_events_of_an_unknown_layout_are_refused() -> None:
    with pytest.raises(IndexRefusal) as refusal:
        inventory().apply([BlockStored(bytes(16), 0, LONG.at(16), LONG.root, 16)])
    assert refusal.value.reason == "unknown_layout"


def run(first: int, end: int, *, tier: Tier = "memory") -> BlocksStored:
    """Blocks `first` to `end` of LONG as one change."""
    hashes = tuple(LONG.at(16 * block) for block in range(first + 1, end + 1))
    return BlocksStored(DENSE.fingerprint, 0, hashes, LONG.at(16 * first), 16 * (first + 1), 16, tier)


def test_a_run_is_announced_like_its_blocks() -> None:
    as_one, one_by_one = inventory(), inventory()
    stored = [run(0, 150), run(150, 170), run(160, 180), run(60, 90, tier="ssd"), run(200, 200), run(190, 200)]
    removed = [run(140, 160).hashes, (LONG.at(3200),)]
    changes: list[PoolChange] = [*stored, *(BlocksRemoved(DENSE.fingerprint, 0, hashes) for hashes in removed)]
    for change in changes:
        assert as_one.apply([change]) == one_by_one.apply(list(change.each()))
        assert (as_one.digests(), as_one.num_orphans) == (one_by_one.digests(), one_by_one.num_orphans)
    assert as_one.everything() == one_by_one.everything()


def test_a_run_at_a_wrong_place_is_refused() -> None:
    node = inventory()
    node.apply([run(0, 10)])
    assert node.apply([replace(run(10, 12), num_tokens=16 * 13)]) == []
    assert node.num_refused == 1


class AsOne(BlocksStored):
    """A run that nobody may take block by block."""

    def each(self) -> Iterator[BlockStored]:
        raise AssertionError("an object for each block")


def as_one(change: BlocksStored) -> AsOne:
    return AsOne(
        change.layout, change.group, change.hashes, change.parent, change.num_tokens, change.block_tokens, change.tier
    )


def test_a_run_that_another_tier_holds_is_stored_at_once() -> None:
    node, one_by_one = inventory(), inventory()
    for change in (run(0, 150), run(20, 90, tier="ssd"), run(10, 30, tier="ssd")):
        assert node.apply([as_one(change)]) == one_by_one.apply(list(change.each()))
    for tier in ("memory", "ssd"):
        for of_two in (node, one_by_one):
            of_two.apply([BlocksRemoved(DENSE.fingerprint, 0, run(20, 80).hashes, tier)])
    assert node.digests() == one_by_one.digests()
    assert node.everything() == one_by_one.everything()


def test_a_run_is_stored_at_once_beside_unrelated_orphans() -> None:
    node = inventory()
    node.apply([BlockStored(DENSE.fingerprint, 0, BlockHash(bytes(32)), BlockHash(b"\1" * 32), 160)])
    (segment,) = node.apply([as_one(run(0, 20))])
    assert isinstance(segment, Segment)
    assert segment.bitmap == (1 << 20) - 1
    assert node.num_orphans == 1


def test_a_run_with_the_parent_of_an_orphan_announces_both() -> None:
    node = inventory()
    node.apply([run(20, 30)])
    (segment,) = node.apply([run(0, 20)])
    assert isinstance(segment, Segment)
    assert segment.bitmap == (1 << 30) - 1
    assert node.num_orphans == 0
