"""Time to first token under a plan: without queues as in the paper, and with queues at a given arrival rate.

Waiting before k servers is M/G/k by the Allen-Cunneen approximation, which is exact for M/M/k and M/G/1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from prfaas.model.cost.curve import FloatArray
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment
from prfaas.model.planning.plan import Plan

# Longer traces are represented by so many requests. With queues there are fewer, since a bisection visits all of them.
_NUM_POINTS = 1 << 15
_NUM_QUEUED_POINTS = 1 << 12


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


def erlang_c(num_servers: int, load: float) -> float:
    """Return the probability of waiting in M/M/k at load ρ, by Erlang B's recursion, which never overflows."""
    if load >= 1.0:
        return 1.0
    offered, blocked = load * num_servers, 1.0
    for servers in range(1, num_servers + 1):
        blocked = offered * blocked / (servers + offered * blocked)
    return blocked / (1.0 - load * (1.0 - blocked))


@dataclass(frozen=True)
class Ttft:
    """Mean and one quantile over all requests, in seconds."""

    mean_seconds: float
    quantile_seconds: float


@dataclass(frozen=True)
class _Path:
    """One way to the first token: weight, prefill seconds and transfer seconds of each request."""

    weights: FloatArray
    prefill: FloatArray
    transfer: FloatArray
    num_servers: float

    @property
    def service(self) -> FloatArray:
        return self.prefill + self.transfer


def queue_free(plan: Plan, deployment: Deployment, workload: Workload, *, quantile: float = 0.9) -> Ttft:
    """Return the paper's TTFT: T_prefill(L), plus S_kv(L) over the egress if offloaded. Local transfers are free."""
    paths = _paths(plan, deployment, workload, _NUM_POINTS)
    weights = np.concatenate([path.weights for path in paths])
    seconds = np.concatenate([path.service for path in paths])
    return Ttft(float(weights @ seconds / weights.sum()), _weighted_quantile(seconds, weights, quantile))


def with_queueing(
    plan: Plan, deployment: Deployment, workload: Workload, *, arrivals_per_second: float, quantile: float = 0.9
) -> Ttft:
    """Return TTFT with Poisson arrivals: M/G/k before each cluster's prefill instances, M/G/1 before each egress."""
    paths = [path for path in _paths(plan, deployment, workload, _NUM_QUEUED_POINTS) if path.weights.any()]
    total = sum(path.weights.sum() for path in paths)
    mean = 0.0
    queues = []
    for path in paths:
        queue = _queue(path, path.prefill, path.num_servers, arrivals_per_second)
        wait = queue.mean_wait_seconds + _transfer_wait(path, arrivals_per_second)
        mean += float(path.weights @ (path.service + wait)) / total
        queues.append((path, queue))
    if math.isinf(mean):
        return Ttft(math.inf, math.inf)
    return Ttft(mean, _queued_quantile(queues, arrivals_per_second, quantile))


def _paths(plan: Plan, deployment: Deployment, workload: Workload, count: int) -> list[_Path]:
    """Return each path with its share of the requests. Turns appended on a decode node are prefilled without a queue."""
    new, cached, weights = workload.prefilled.points(count)
    threshold = math.inf if plan.threshold_tokens is None else plan.threshold_tokens
    if plan.threshold_tokens is None and plan.offload_ratio:
        threshold = 0.0
    long, kv = new > threshold, deployment.model.curve()
    paths = []
    for cluster, share in zip(deployment.prfaas, plan.remote_shares, strict=True):
        seconds = cluster.profile.prefill.at(new[long], cached[long])
        transfer = kv.many(new[long]) / deployment.egress(cluster)
        paths.append(_Path(weights[long] * share, seconds, transfer, cluster.num_instances))
    for pd, split, share in zip(deployment.pd, plan.splits, plan.local_shares, strict=True):
        seconds = pd.profile.prefill.at(new[~long], cached[~long])
        paths.append(_Path(weights[~long] * share, seconds, np.zeros_like(seconds), split.num_prefill))
    if workload.later is not None and workload.later.local_ratio:
        paths.append(_appended(deployment, workload, count))
    return paths


def _appended(deployment: Deployment, workload: Workload, count: int) -> _Path:
    assert workload.later is not None
    new, cached, weights = workload.later.lengths.points(count)
    seconds = deployment.pd[0].profile.prefill.at(new, cached)
    return _Path(weights * workload.appended_ratio, seconds, np.zeros_like(seconds), math.inf)


def _queue(path: _Path, seconds: FloatArray, num_servers: float, arrivals_per_second: float) -> QueueModel:
    """Return the queue before `num_servers` that serve each request of a path for `seconds`."""
    share = float(path.weights.sum())
    mean = float(path.weights @ seconds) / share
    square = float(path.weights @ seconds**2) / share
    squared_cv = max(square / mean**2 - 1.0, 0.0) if mean else 0.0
    return QueueModel(num_servers, arrivals_per_second * share, mean, squared_cv)


def _transfer_wait(path: _Path, arrivals_per_second: float) -> float:
    if not path.transfer.any():
        return 0.0
    return _queue(path, path.transfer, 1, arrivals_per_second).mean_wait_seconds


def _queued_quantile(queues: list[tuple[_Path, QueueModel]], arrivals: float, quantile: float) -> float:
    """Return x with P(TTFT > x) = 1 − quantile, by bisection; the wait for the egress enters by its mean."""
    services = [path.service + _transfer_wait(path, arrivals) for path, _ in queues]
    total = sum(float(path.weights.sum()) for path, _ in queues)

    def beyond(seconds: float) -> float:
        parts = zip(queues, services, strict=True)
        return sum(float(path.weights @ _tail(queue, seconds - service)) for (path, queue), service in parts) / total

    longest_wait = max(queue.mean_wait_seconds for _, queue in queues)
    low, high = 0.0, max(float(service.max()) for service in services) + 50 * longest_wait
    for _ in range(26):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if beyond(middle) > 1 - quantile else (low, middle)
    return high


def _tail(queue: QueueModel, left: FloatArray) -> FloatArray:
    """Return P(W > left) for each element: waits are exponential with the mean that E[W] implies."""
    wait = queue.mean_wait_seconds
    if not wait:
        return np.where(left < 0, 1.0, 0.0)
    probability = queue.waiting_probability
    return np.where(left < 0, 1.0, probability * np.exp(-np.maximum(left, 0.0) * probability / wait))


def _weighted_quantile(values: FloatArray, weights: FloatArray, quantile: float) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    index = min(int(np.searchsorted(reached, quantile * reached[-1])), len(values) - 1)
    return float(values[order][index])
