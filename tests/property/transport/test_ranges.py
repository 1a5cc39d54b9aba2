"""Sets of numbers as ranges, against plain sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.transport.ranges import Ranges

SIZE = 60
piece = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted).map(tuple)
steps = st.lists(st.tuples(st.booleans(), piece))


@given(steps, piece)
def test_ranges_equal_a_set_of_numbers(done: list[tuple[bool, tuple[int, int]]], asked: tuple[int, int]) -> None:
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
    wanted = set(range(*asked))
    assert {number for a, b in ranges.missing(*asked) for number in range(a, b)} == wanted - model
    assert ranges.covers(*asked) == (wanted <= model)
    assert ranges.touches(*asked) == bool(wanted & model)
    assert all((number in ranges) == (number in model) for number in range(SIZE + 1))
    assert ranges.copy() == ranges == Ranges(ranges.to_list())
