"""A fleet that follows the arrivals of a day meets the objective for less than the fleet that serves the peak."""

import pytest

from benchmarks.twin.scaled_day import TTFT_SECONDS, scaled_day


@pytest.mark.timeout(600)
def test_scaled_fleet_meets_the_objective_in_each_hour_for_15_percent_less() -> None:
    day = scaled_day(hours=24.0, seed=0)
    assert max(day.ttft_seconds) <= TTFT_SECONDS
    assert day.saved_ratio >= 0.15


def test_fixed_fleet_costs_its_price() -> None:
    day = scaled_day(hours=1.0, seed=0, autoscaled=False)
    assert day.saved_ratio == pytest.approx(0.0)
    assert max(day.ttft_seconds) <= TTFT_SECONDS
