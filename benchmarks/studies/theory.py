"""One station of the twin beside what queueing theory says of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prfaas.model.capacity.queueing import QueueModel
from prfaas.model.cost.curve import FloatArray
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.stations import Station


@dataclass(frozen=True)
class Served:
    """Means over all requests in seconds, the servers' busy time, the end."""

    mean_wait: float
    mean_stay: float
    busy_seconds: float
    end: float


def serve(service: FloatArray, *, rate: float, num_servers: int, generator: np.random.Generator) -> Served:
    """Return all requests through one pool with Poisson arrivals of exactly this mean rate."""
    timeline = Timeline()
    waits: list[float] = []
    stays: list[float] = []

    def started(request: SimulatedRequest, seconds: float) -> None:
        waits.append(timeline.now - request.arrival)

    pool = Station(
        timeline, num_servers, on_start=started, on_end=lambda request: stays.append(timeline.now - request.arrival)
    )
    gaps = _with_mean(generator.exponential(1.0, len(service)), 1 / rate)
    arriving = iter(zip(np.cumsum(gaps).tolist(), service.tolist(), strict=True))

    def await_next() -> None:
        for time, seconds in arriving:
            timeline.at(time, arrive, (SimulatedRequest(0, time, num_prompt_tokens=1, num_output_tokens=1), seconds))
            return

    def arrive(pair: tuple[SimulatedRequest, float]) -> None:
        await_next()
        pool.enter(*pair)

    await_next()
    timeline.run()
    return Served(float(np.mean(waits)), float(np.mean(stays)), pool.busy.total, timeline.now)


def _with_mean(values: FloatArray, mean: float) -> FloatArray:
    """Scaled to exactly this mean, so that the load is the one that theory is asked for."""
    scaled: FloatArray = values * (mean / values.mean())
    return scaled


def service_times(squared_cv: float, count: int, generator: np.random.Generator) -> FloatArray:
    """Gamma with mean 1 and the given variance, all equal for 0."""
    if not squared_cv:
        return np.ones(count)
    return _with_mean(generator.gamma(1 / squared_cv, squared_cv, count), 1.0)


def relative_wait(num_servers: int, squared_cv: float, load: float, *, count: int) -> float:
    """Return the simulated mean wait over that of M/G/k (Allen-Cunneen), always of the same requests."""
    generator = np.random.default_rng(1)
    rate = load * num_servers
    served = serve(service_times(squared_cv, count, generator), rate=rate, num_servers=num_servers, generator=generator)
    return served.mean_wait / QueueModel(num_servers, rate, 1.0, squared_cv).mean_wait_seconds
