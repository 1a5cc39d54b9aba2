"""Stations wait as queueing theory says they do; arrivals are from a fixed seed, so that the figures never move."""

import numpy as np
import pytest

from benchmarks.studies.theory import relative_wait, serve, service_times

NUM_REQUESTS = 150_000
NUM_SOAKED = 1_000_000
CASES = [
    pytest.param(1, 1.0, 0.5, id="M/M/1"),
    pytest.param(1, 1.0, 0.7, id="M/M/1 busier"),
    pytest.param(1, 0.0, 0.7, id="M/D/1"),
    pytest.param(1, 0.64, 0.5, id="M/G/1"),
    pytest.param(1, 2.0, 0.5, id="M/G/1 of high variance"),
    pytest.param(4, 1.0, 0.7, id="M/M/4"),
    pytest.param(3, 0.64, 0.6, id="M/G/3"),
    pytest.param(9, 0.64, 0.8, id="M/G/9"),
]


# The remaining cases need more requests.
@pytest.mark.parametrize(("num_servers", "squared_cv", "load"), CASES[::6])
def test_the_mean_wait_is_within_three_percent_of_theory(num_servers: int, squared_cv: float, load: float) -> None:
    assert relative_wait(num_servers, squared_cv, load, count=NUM_REQUESTS) == pytest.approx(1.0, abs=0.03)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_servers", "squared_cv", "load"), CASES)
def test_the_mean_wait_is_within_three_percent_of_theory_in_the_long_run(
    num_servers: int, squared_cv: float, load: float
) -> None:
    assert relative_wait(num_servers, squared_cv, load, count=NUM_SOAKED) == pytest.approx(1.0, abs=0.03)


def test_servers_are_busy_for_exactly_the_work_they_were_given() -> None:
    generator = np.random.default_rng(3)
    service = service_times(0.5, 2_000, generator)
    served = serve(service, rate=2.0, num_servers=3, generator=generator)
    assert served.busy_seconds == pytest.approx(float(service.sum()), rel=1e-12)
    assert served.busy_seconds <= 3 * served.end
