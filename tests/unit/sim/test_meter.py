"""Meters over parts of a run."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.sim.kernel.meter import LoadSeries, Meter

spans = st.lists(
    st.tuples(st.integers(0, 100), st.integers(0, 30), st.integers(0, 1000)).map(
        lambda drawn: (drawn[0] / 7, (drawn[0] + drawn[1]) / 7, float(drawn[2]))
    ),
    max_size=20,
)


def by_hand(start: float, end: float, amount: float, low: float, high: float) -> float:
    if start == end:
        return amount if low <= start < high else 0.0
    return amount * max(0.0, min(end, high) - max(start, low)) / (end - start)


@given(spans)
def test_meter_splits_amounts_by_time(added: list[tuple[float, float, float]]) -> None:
    # No span begins on an edge.
    meter, edges = Meter(), np.linspace(-0.013, 20.0, 12)
    for span in added:
        meter.add(*span)
    expected = [sum(by_hand(*span, low, high) for span in added) for low, high in itertools.pairwise(edges)]
    assert meter.between(edges) == pytest.approx(expected, abs=1e-6)
    assert meter.between(edges).sum() == pytest.approx(meter.total, abs=1e-6)


def test_load_is_relative_to_the_capacity_of_all() -> None:
    first, second = Meter(), Meter()
    first.add(0.0, 10.0, 10.0)
    second.add(5.0, 10.0, 5.0)
    assert LoadSeries([first, second], 2).over(np.array([0.0, 5.0, 10.0])) == (0.5, 1.0)
