"""Queues of the planner: waits before k servers, and transfers that share a link.

Waiting before k servers is M/G/k by the Allen-Cunneen approximation, which is exact for M/M/k and M/G/1. A link is
shared equally by its transfers (processor sharing), as in the twin.
"""

import math
from dataclasses import dataclass

import numpy as np

from prfaas.model.cost.curve import FloatArray

# Standard normal quantiles in the middles of equal parts, by which a distribution is represented.
_NORMAL_QUANTILES = (-1.5932, -0.9674, -0.5887, -0.2793, 0.0, 0.2793, 0.5887, 0.9674, 1.5932)


@dataclass(frozen=True)
class QueueModel:
    """Queue before k servers with Poisson arrivals.

    `num_servers` may be a fraction for shared instances. `squared_cv` is the variance of the service time over its
    squared mean.
    """

    num_servers: float
    arrivals_per_second: float
    mean_seconds: float
    squared_cv: float

    @property
    def load(self) -> float:
        """Return ρ, the share of time in which the servers are busy."""
        return self.arrivals_per_second * self.mean_seconds / self.num_servers if self.num_servers else math.inf

    @property
    def waiting_probability(self) -> float:
        """Return Erlang's C, the probability that an arrival finds every server busy."""
        return erlang_c(max(round(self.num_servers), 1), self.load)

    @property
    def mean_wait_seconds(self) -> float:
        """Return E[W] ≈ C(k, ρ) / (k/E[S] − λ) · (1 + c²) / 2; infinite at a load of 1 or more."""
        if not self.arrivals_per_second or math.isinf(self.num_servers):
            return 0.0
        if self.load >= 1.0:
            return math.inf
        drain = self.num_servers / self.mean_seconds - self.arrivals_per_second
        return self.waiting_probability / drain * (1.0 + self.squared_cv) / 2.0

    @property
    def relaxation_seconds(self) -> float:
        """Return the scale of the time in which the queue forgets its state."""
        return self.mean_seconds / self.num_servers / max(1.0 - self.load, 1e-9) ** 2

    @property
    def departures_squared_cv(self) -> float:
        """Return the squared variation of the gaps between departures (Whitt's approximation); 1 for Poisson."""
        if math.isinf(self.num_servers):
            return 1.0
        return 1.0 + self.load**2 / math.sqrt(max(self.num_servers, 1.0)) * (self.squared_cv - 1.0)

    def tail(self, seconds: FloatArray) -> FloatArray:
        """Return P(W > x) for each element: waits are exponential with the mean that E[W] implies."""
        wait = self.mean_wait_seconds
        if not wait:
            return np.where(seconds < 0, 1.0, 0.0)
        probability = self.waiting_probability
        return np.where(seconds < 0, 1.0, probability * np.exp(-np.maximum(seconds, 0.0) * probability / wait))


def erlang_c(num_servers: int, load: float) -> float:
    """Return the probability of waiting in M/M/k at load ρ, by Erlang B's recursion, which never overflows."""
    if load >= 1.0:
        return 1.0
    offered, blocked = load * num_servers, 1.0
    for servers in range(1, num_servers + 1):
        blocked = offered * blocked / (servers + offered * blocked)
    return blocked / (1.0 - load * (1.0 - blocked))


@dataclass(frozen=True)
class SharedLink:
    """Link that transfers share equally. Times are those of a transfer that has the link to itself.

    `arrivals_squared_cv` is the squared variation of the gaps between arrivals. With Poisson arrivals the mean time of a
    transfer of s seconds is s / (1 − ρ), whatever the sizes are. Other arrivals scale the others' part as in heavy
    traffic.
    """

    arrivals_per_second: float
    mean_seconds: float
    squared_cv: float
    arrivals_squared_cv: float = 1.0

    @property
    def load(self) -> float:
        """Return ρ, the share of time in which the link is busy."""
        return self.arrivals_per_second * self.mean_seconds

    def mean_delay_seconds(self, seconds: FloatArray) -> FloatArray:
        """Return the seconds that the others add on average to each transfer; infinite at a load of 1 or more."""
        if self.load >= 1.0:
            return np.full_like(seconds, math.inf)
        burstiness = (self.arrivals_squared_cv + self.squared_cv) / (1.0 + self.squared_cv)
        return seconds * (burstiness * self.load / (1.0 - self.load))

    def delays(self, seconds: FloatArray) -> FloatArray:
        """Return equally likely delays of each transfer, shape [quantile, transfer], with their mean.

        They follow a gamma distribution with the variance of M/G/1 under processor sharing. The number of transfers that
        share the link changes with the time that a first-come queue would need.
        """
        mean = self.mean_delay_seconds(seconds)
        if not self.load or self.load >= 1.0:
            return np.tile(mean, (len(_NORMAL_QUANTILES), 1))
        fading = self.mean_seconds * (1.0 + self.squared_cv) / 2.0 / (1.0 - self.load)
        memory = seconds * fading - fading**2 * -np.expm1(-seconds / fading)
        variance = 2.0 * self.load / (1.0 - self.load) ** 2 * memory
        ninth = variance / np.maximum(mean, 1e-12) ** 2 / 9.0
        normal = np.array(_NORMAL_QUANTILES)[:, None]
        cubes = np.maximum(1.0 - ninth + normal * np.sqrt(ninth), 0.0) ** 3
        delays: FloatArray = cubes * (mean / np.maximum(cubes.mean(axis=0), 1e-12))
        return delays
