"""The inventory: paths, orphans, digests."""

from __future__ import annotations

import pytest

from prfaas.errors import IndexRefusal
from prfaas.events import BlockRemoved, BlockStored
from prfaas.index.inventory import Inventory
from prfaas.index.segments import Segment
from tests.unit.index.test_index import DENSE, LONG, blocks


def inventory() -> Inventory:
    made = Inventory()
    made.add_layout(DENSE)
    return made


def test_a_prompt_becomes_one_segment_per_cell_of_64_blocks() -> None:
    told = inventory().apply(blocks(DENSE, range(130 * 16)))
    segments = [its for its in told if isinstance(its, Segment)]
    assert sorted(its.num_path_blocks for its in segments) == [2, 64, 64]
    assert {its.head for its in segments} == {LONG.at(16), LONG.at(65 * 16), LONG.at(129 * 16)}


def test_a_later_block_is_told_with_its_path_and_only_its_own_bit() -> None:
    its = inventory()
    its.apply(blocks(DENSE, range(160)))
    (segment,) = its.apply(blocks(DENSE, range(160, 176)))
    assert isinstance(segment, Segment)
    assert (segment.head, segment.num_path_blocks, segment.bitmap) == (LONG.at(16), 11, 1 << 10)


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


def test_a_block_whose_parent_went_is_still_told_with_its_whole_path() -> None:
    its = inventory()
    its.apply(blocks(DENSE, range(160)))
    its.apply([BlockRemoved(DENSE.fingerprint, 0, LONG.at(80))])
    (segment,) = its.everything()
    assert isinstance(segment, Segment)
    assert segment.num_path_blocks == 10
    assert segment.bitmap == (1 << 10) - 1 - (1 << 4)


def test_nothing_is_left_when_all_is_removed() -> None:
    its = inventory()
    its.apply(blocks(DENSE, range(3200)))
    its.apply([BlockRemoved(DENSE.fingerprint, 0, LONG.at(end)) for end in range(16, 3201, 16)])
    assert its.everything() == []
    assert its.digests() == {}
    assert not any(its._links.values())


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
