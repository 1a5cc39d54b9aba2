"""Which bytes of an object have arrived."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.transport.ranges import Ranges

SIZE = 60
pieces = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted).filter(lambda p: p[0] < p[1]))


@given(pieces)
def test_ranges_equal_a_set_of_bytes_under_any_order_and_duplication(added: list[list[int]]) -> None:
    ranges, model = Ranges(), set[int]()
    for start, end in added:
        fresh = set(range(start, end)) - model
        assert ranges.add(start, end) == len(fresh)
        model |= fresh
        assert ranges.total == len(model)
        assert {byte for first, last in ranges.to_list() for byte in range(first, last)} == model
        assert all(a[1] < b[0] for a, b in zip(ranges.to_list(), ranges.to_list()[1:], strict=False))


@given(pieces, st.integers(0, SIZE), st.integers(0, SIZE))
def test_missing_names_exactly_what_is_not_covered(added: list[list[int]], first: int, second: int) -> None:
    ranges = Ranges()
    for start, end in added:
        ranges.add(start, end)
    start, end = sorted((first, second))
    covered = {byte for a, b in added for byte in range(a, b)}
    gaps = {byte for a, b in ranges.missing(start, end) for byte in range(a, b)}
    assert gaps == set(range(start, end)) - covered
