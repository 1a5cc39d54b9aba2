"""Waiting before a station of k servers: M/G/k by the Allen-Cunneen approximation, exact for M/M/k and for M/G/1."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Station:
    """k servers with Poisson arrivals. `num_servers` is whole or, for instances that share their time, a fraction."""

    num_servers: float
    arrivals_per_second: float
    mean_seconds: float
    squared_cv: float  # variance of the service time over its squared mean

    @property
    def load(self) -> float:
        """ρ: the share of time that the servers are busy."""
        return self.arrivals_per_second * self.mean_seconds / self.num_servers if self.num_servers else math.inf

    @property
    def waiting_probability(self) -> float:
        """Erlang's C: how often an arrival finds every server busy."""
        return erlang_c(max(round(self.num_servers), 1), self.load)

    @property
    def mean_wait_seconds(self) -> float:
        """E[W] ≈ C(k, ρ) / (k/E[S] − λ) · (1 + c²) / 2; infinite at a load of 1 or more."""
        if not self.arrivals_per_second or math.isinf(self.num_servers):
            return 0.0
        if self.load >= 1.0:
            return math.inf
        drain = self.num_servers / self.mean_seconds - self.arrivals_per_second
        return self.waiting_probability / drain * (1.0 + self.squared_cv) / 2.0


def erlang_c(num_servers: int, load: float) -> float:
    """Return the probability of waiting in M/M/k at load ρ, by Erlang B's recursion, which never overflows."""
    if load >= 1.0:
        return 1.0
    offered, blocked = load * num_servers, 1.0
    for servers in range(1, num_servers + 1):
        blocked = offered * blocked / (servers + offered * blocked)
    return blocked / (1.0 - load * (1.0 - blocked))
