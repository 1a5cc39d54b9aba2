"""Sizes of objects as runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.transport.protocol.messages import MAX_OBJECTS, MAX_RUNS, ObjectSizes
from prfaas.transport.ranges import Ranges, Slab

sizes = st.lists(st.integers(1, 9), max_size=30)


@given(sizes)
def test_runs_read_like_the_list_that_they_stand_for(plain: list[int]) -> None:
    made = ObjectSizes.of(plain)
    assert list(made) == plain == made[:] and len(made) == len(plain) and made.total_bytes == sum(plain)
    assert ObjectSizes.of(made) is made


@given(sizes, st.builds(Slab, st.integers(0, 31), st.integers(1, 31), st.integers(0, 9), st.integers(1, 9)))
def test_a_slab_is_held_when_every_object_has_its_bytes(plain: list[int], slab: Slab) -> None:
    expected = slab.last <= len(plain) and all(plain[i] >= slab.end for i in range(slab.first, slab.last))
    assert ObjectSizes.of(plain).holds(slab) == expected


@given(sizes, st.data())
def test_bytes_of_some_objects_are_the_sum_of_their_sizes(plain: list[int], data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, len(plain) - 1))) if plain else set()
    assert ObjectSizes.of(plain).bytes_of(Ranges((i, i + 1) for i in chosen)) == sum(plain[i] for i in chosen)


def test_neighbours_of_one_size_are_kept_as_one() -> None:
    assert ObjectSizes([(5, 1)] * 1000 + [(6, 2), (6, 3)]).runs == [(5, 1000), (6, 5)]


@pytest.mark.parametrize(
    "runs", [[(0, 1)], [(1, 0)], [(1, MAX_OBJECTS + 1)], [(1, MAX_OBJECTS), (2, 1)], [(1, 1), (2, 1)] * MAX_RUNS]
)
def test_sizes_out_of_bounds_are_refused(runs: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"objects in|no bytes"):
        ObjectSizes(runs)
