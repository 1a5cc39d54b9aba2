"""Arrival processes keep their rate and their burstiness."""

import numpy as np
import pytest

from prfaas.errors import ConfigError
from prfaas.model.cost.curve import FloatArray
from prfaas.sim.workload.arrivals import arrivals


def drawn(text: str, count: int = 100_000) -> FloatArray:
    return arrivals(text, count, 4.0, np.random.default_rng(5))


@pytest.mark.parametrize("text", ["poisson", "gamma:cv=3", "diurnal:period=10m,depth=0.9"])
def test_every_process_ascends_at_the_rate_asked_for(text: str) -> None:
    times = drawn(text)
    assert (np.diff(times) >= 0).all()
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize(("text", "cv"), [("poisson", 1.0), ("gamma:cv=3", 3.0), ("gamma:cv=0.5", 0.5)])
def test_gaps_vary_as_asked_for(text: str, cv: float) -> None:
    gaps = np.diff(drawn(text))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_a_daily_wave_has_its_peak_a_quarter_into_the_period() -> None:
    phase = drawn("diurnal:period=10m,depth=0.8") % 600
    peak, trough = ((phase > 100) & (phase < 200)).sum(), ((phase > 400) & (phase < 500)).sum()
    assert peak / trough == pytest.approx((1 + 0.8 * 0.955) / (1 - 0.8 * 0.955), rel=0.1)


def test_unknown_arrival_process_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="poisson, gamma, diurnal"):
        drawn("weibull")
