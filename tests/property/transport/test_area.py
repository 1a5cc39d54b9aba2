"""Areas over (object, byte), against plain sets of pairs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.transport.ranges import Area, Slab

slabs = st.builds(Slab, st.integers(0, 6), st.integers(1, 5), st.integers(0, 12), st.integers(1, 9))


def cells(slab: Slab) -> set[tuple[int, int]]:
    return {(index, byte) for index in range(slab.first, slab.last) for byte in range(slab.offset, slab.end)}


@given(st.lists(st.tuples(st.booleans(), slabs), max_size=25), slabs)
def test_an_area_equals_a_set_of_bytes(done: list[tuple[bool, Slab]], asked: Slab) -> None:
    area, model = Area(), set[tuple[int, int]]()
    for is_added, slab in done:
        at_most = area.num_fragments + area.growth(slab)
        if is_added:
            assert area.add(slab) == len(cells(slab) - model)
            model |= cells(slab)
        else:
            assert area.remove(slab) == len(cells(slab) & model)
            model -= cells(slab)
        assert area.num_bytes == len(model)
        assert area.num_fragments <= at_most
        assert len(area._starts) <= area.num_fragments == len(list(area.slabs())), "what is not covered takes nothing"
    missing = list(area.missing(asked))
    assert set().union(*map(cells, missing)) == cells(asked) - model
    assert sum(slab.num_bytes for slab in missing) == len(cells(asked) - model), "no byte is named twice"
    assert area.covers(asked) == (cells(asked) <= model)
    whole = list(area.slabs())
    assert set().union(*map(cells, whole)) == model and sum(slab.num_bytes for slab in whole) == len(model)


@given(slabs, slabs)
def test_two_slabs_overlap_when_they_share_a_byte(one: Slab, other: Slab) -> None:
    assert one.overlaps(other) == bool(cells(one) & cells(other))


def test_layers_of_many_blocks_take_one_fragment_each() -> None:
    area = Area()
    for layer in range(64):
        for first in range(0, 1000, 50):
            area.add(Slab(first, 50, layer * 4096, 4096))
    assert (area.num_fragments, area.num_bytes) == (64, 64 * 4096 * 1000)
