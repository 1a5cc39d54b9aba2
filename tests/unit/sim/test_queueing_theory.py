"""Stations wait as queueing theory says they do; arrivals are from a fixed seed, so that the figures never move."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from prfaas.model.curve import FloatArray
from prfaas.model.queueing import Station
from prfaas.sim.pool import Pool
from prfaas.sim.request import Request
from prfaas.sim.timeline import Timeline

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


@dataclass(frozen=True)
class Served:
    mean_wait: float
    mean_stay: float
    area: float
    busy_seconds: float
    end: float


def serve(service: FloatArray, *, rate: float, num_servers: int, generator: np.random.Generator) -> Served:
    """All requests through one pool with Poisson arrivals."""
    timeline = Timeline()
    waits, stays = [], []

    def started(request: Request, seconds: float) -> None:
        waits.append(timeline.now - request.arrival)

    pool = Pool(timeline, num_servers, on_start=started, on_end=lambda one: stays.append(timeline.now - one.arrival))
    gaps = with_mean(generator.exponential(1.0, len(service)), 1 / rate)
    arriving = iter(zip(np.cumsum(gaps).tolist(), service.tolist(), strict=True))

    def await_next() -> None:
        for time, seconds in arriving:
            timeline.at(time, arrive, (Request(0, time, prompt_tokens=1, output_tokens=1), seconds))
            return

    def arrive(pair: tuple[Request, float]) -> None:
        await_next()
        pool.enter(*pair)

    await_next()
    timeline.run()
    return Served(float(np.mean(waits)), float(np.mean(stays)), pool.area, pool.busy_seconds, timeline.now)


def with_mean(values: FloatArray, mean: float) -> FloatArray:
    """Scaled to exactly this mean, so that the load is the one that theory is asked for."""
    scaled: FloatArray = values * (mean / values.mean())
    return scaled


def service_times(squared_cv: float, count: int, generator: np.random.Generator) -> FloatArray:
    """Gamma with mean 1 and the given variance, all equal for 0."""
    if not squared_cv:
        return np.ones(count)
    return with_mean(generator.gamma(1 / squared_cv, squared_cv, count), 1.0)


def relative_wait(num_servers: int, squared_cv: float, load: float, *, count: int) -> float:
    """The simulated mean wait over the theory's."""
    generator = np.random.default_rng(1)
    rate = load * num_servers
    served = serve(service_times(squared_cv, count, generator), rate=rate, num_servers=num_servers, generator=generator)
    return served.mean_wait / Station(num_servers, rate, 1.0, squared_cv).mean_wait_seconds


@pytest.mark.parametrize(("num_servers", "squared_cv", "load"), CASES[::3])  # the others need more requests
def test_the_mean_wait_is_within_three_percent_of_theory(num_servers: int, squared_cv: float, load: float) -> None:
    assert relative_wait(num_servers, squared_cv, load, count=NUM_REQUESTS) == pytest.approx(1.0, abs=0.03)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_servers", "squared_cv", "load"), CASES)
def test_the_mean_wait_is_within_three_percent_of_theory_in_the_long_run(
    num_servers: int, squared_cv: float, load: float
) -> None:
    assert relative_wait(num_servers, squared_cv, load, count=NUM_SOAKED) == pytest.approx(1.0, abs=0.03)


def test_littles_law_holds_for_what_a_station_counts() -> None:
    generator = np.random.default_rng(2)
    served = serve(service_times(0.64, 5_000, generator), rate=2.5, num_servers=3, generator=generator)
    assert served.area == pytest.approx(5_000 * served.mean_stay, rel=1e-9)


def test_servers_are_busy_for_exactly_the_work_they_were_given() -> None:
    generator = np.random.default_rng(3)
    service = service_times(0.5, 2_000, generator)
    served = serve(service, rate=2.0, num_servers=3, generator=generator)
    assert served.busy_seconds == pytest.approx(float(service.sum()), rel=1e-12)
    assert served.busy_seconds <= 3 * served.end
