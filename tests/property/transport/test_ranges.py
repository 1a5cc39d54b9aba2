"""Areas and ranges, compared with plain sets."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.transport.ranges import Area, Ranges, Slab

slabs = st.builds(Slab, st.integers(0, 6), st.integers(1, 5), st.integers(0, 12), st.integers(1, 9))


def cells(slab: Slab) -> set[tuple[int, int]]:
    return {(index, byte) for index in range(slab.first, slab.last) for byte in range(slab.offset, slab.end)}


@given(st.lists(st.tuples(st.booleans(), slabs), max_size=25), slabs)
def test_an_area_equals_a_set_of_bytes(steps: list[tuple[bool, Slab]], queried: Slab) -> None:
    area, model = Area(), set[tuple[int, int]]()
    for is_added, slab in steps:
        at_most = area.num_fragments + area.growth(slab)
        if is_added:
            assert area.add(slab) == len(cells(slab) - model)
            model |= cells(slab)
        else:
            assert area.remove(slab) == len(cells(slab) & model)
            model -= cells(slab)
        assert area.num_bytes == len(model)
        assert area.num_fragments <= at_most
        assert len(area._starts) <= area.num_fragments == len(list(area.slabs()))
    missing = list(area.missing(queried))
    assert set().union(*map(cells, missing)) == cells(queried) - model
    assert sum(slab.num_bytes for slab in missing) == len(cells(queried) - model)
    assert area.covers(queried) == (cells(queried) <= model)
    whole = list(area.slabs())
    assert set().union(*map(cells, whole)) == model and sum(slab.num_bytes for slab in whole) == len(model)


@given(slabs, slabs)
def test_two_slabs_overlap_when_they_share_a_byte(left: Slab, right: Slab) -> None:
    assert left.overlaps(right) == bool(cells(left) & cells(right))


def test_layers_of_many_blocks_take_one_fragment_each() -> None:
    area = Area()
    for layer in range(64):
        for first in range(0, 1000, 50):
            area.add(Slab(first, 50, layer * 4096, 4096))
    assert (area.num_fragments, area.num_bytes) == (64, 64 * 4096 * 1000)


SIZE = 60
piece = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted).map(tuple)
steps = st.lists(st.tuples(st.booleans(), piece))


@given(steps, piece)
def test_ranges_equal_a_set_of_numbers(done: list[tuple[bool, tuple[int, int]]], queried: tuple[int, int]) -> None:
    ranges, model = Ranges(), set[int]()
    for is_added, (start, end) in done:
        span = set(range(start, end))
        if is_added:
            assert ranges.add(start, end) == len(span - model)
            model |= span
        else:
            assert ranges.remove(start, end) == len(span & model)
            model -= span
        assert ranges.total == len(model)
        assert {number for first, last in ranges.to_list() for number in range(first, last)} == model
        assert all(a[1] < b[0] for a, b in zip(ranges.to_list(), ranges.to_list()[1:], strict=False))
    wanted = set(range(*queried))
    assert {number for a, b in ranges.missing(*queried) for number in range(a, b)} == wanted - model
    assert ranges.covers(*queried) == (wanted <= model)
    assert ranges.touches(*queried) == bool(wanted & model)
    assert all((number in ranges) == (number in model) for number in range(SIZE + 1))
    assert ranges.copy() == ranges == Ranges(ranges.to_list())
