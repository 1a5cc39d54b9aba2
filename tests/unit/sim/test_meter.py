"""What accrues over a run adds up in its parts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.sim.kernel.meter import LoadSeries, Meter

spans = st.lists(
    st.tuples(st.integers(0, 100), st.integers(0, 30), st.integers(0, 1000)).map(
        lambda one: (one[0] / 7, (one[0] + one[1]) / 7, float(one[2]))
    ),
    max_size=20,
)


def by_hand(start: float, end: float, amount: float, low: float, high: float) -> float:
    if start == end:
        return amount if low <= start < high else 0.0
    return amount * max(0.0, min(end, high) - max(start, low)) / (end - start)


@given(spans)
def test_each_part_has_what_fell_into_it(added: list[tuple[float, float, float]]) -> None:
    meter, edges = Meter(), np.linspace(-0.013, 20.0, 12)  # no span begins on an edge
    for span in added:
        meter.add(*span)
    expected = [sum(by_hand(*span, low, high) for span in added) for low, high in itertools.pairwise(edges)]
    assert meter.between(edges) == pytest.approx(expected, abs=1e-6)
    assert meter.between(edges).sum() == pytest.approx(meter.total, abs=1e-6)


def test_a_load_is_a_share_of_what_all_could() -> None:
    one, other = Meter(), Meter()
    one.add(0.0, 10.0, 10.0)
    other.add(5.0, 10.0, 5.0)
    assert LoadSeries([one, other], 2).over(np.array([0.0, 5.0, 10.0])) == (0.5, 1.0)
