"""Meters over parts of a run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.sim.kernel.meter import Load, Meter

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


@given(spans, st.integers(-1, 20))
def test_meter_splits_amounts_by_time(added: list[tuple[float, float, float]], second: int) -> None:
    meter, moment = Meter(), second + 0.013  # No span begins there.
    for span in added:
        meter.add(*span)
    expected = sum(by_hand(*span, -1.0, moment) for span in added)
    assert meter.until(moment) == pytest.approx(expected, abs=1e-6)
    assert meter.until(100.0) == pytest.approx(meter.total, abs=1e-6)


def test_load_is_relative_to_the_capacity_of_all() -> None:
    first, second = Meter(), Meter()
    first.add(0.0, 10.0, 10.0)
    second.add(5.0, 10.0, 5.0)
    assert [Load([first, second], 2).until(moment) for moment in (5.0, 10.0)] == [0.5, 0.75]
