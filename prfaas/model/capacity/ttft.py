"""Time to first token under a plan: without queues as in the paper, and with queues at a given arrival rate."""

import math
from dataclasses import dataclass

import numpy as np

from prfaas.model.capacity.decoding import decode_capacity
from prfaas.model.capacity.queueing import QueueModel, SharedLink
from prfaas.model.cost.curve import FloatArray
from prfaas.model.cost.profile import Profile
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment
from prfaas.model.planning.plan import Plan

# Longer traces are represented by so many requests. With queues there are fewer, since each has many delays.
_NUM_POINTS = 1 << 11
_NUM_QUEUED_POINTS = 1 << 10
# Multiple of the prefill queue's relaxation in which its departures come to vary as its arrivals; fitted to the twin.
_FORGETTING = 48.0


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


def estimate_ttft(
    plan: Plan, deployment: Deployment, workload: Workload, *, arrivals_per_second: float = 0.0, quantile: float = 0.9
) -> Ttft:
    """Return TTFT with Poisson arrivals: M/G/k before each cluster's prefill instances, a shared link, places to decode.

    Without arrivals nobody waits, as in the paper: T_prefill(L), plus S_kv(L) over the egress if offloaded. Transfers
    within a cluster are free.
    """
    num_points = _NUM_QUEUED_POINTS if arrivals_per_second else _NUM_POINTS
    paths = [path for path in _paths(plan, deployment, workload, num_points) if path.weights.any()]
    total = sum(path.weights.sum() for path in paths)
    decode = _decode_wait(plan, deployment, workload, arrivals_per_second)
    mean = decode
    waits = []
    for path in paths:
        queue = _queue(path, path.prefill, path.num_servers, arrivals_per_second)
        delays = _transfer_delays(path, queue)
        mean += float(path.weights @ (path.service + delays.mean(axis=0) + queue.mean_wait_seconds)) / total
        waits.append((path, queue, path.service + delays + decode))
    if math.isinf(mean):
        return Ttft(math.inf, math.inf)
    return Ttft(mean, _queued_quantile(waits, quantile))


def _paths(plan: Plan, deployment: Deployment, workload: Workload, count: int) -> list[_Path]:
    """Return each path with its share of the requests."""
    new, cached, weights = workload.lengths.points(count)
    threshold = math.inf if plan.threshold_tokens is None else plan.threshold_tokens
    if plan.threshold_tokens is None and plan.offload_ratio:
        threshold = 0.0
    long, kv = (new > threshold).astype(float), deployment.model.curve()

    def shares(source: str | None, decode: str | None, otherwise: FloatArray) -> FloatArray:
        """Return the part of each request that takes some routes, or `otherwise` without any in the plan."""
        taken, total = np.zeros_like(new), np.zeros_like(new)
        for route in plan.routes:
            within = route.share * ((route.above_tokens < new) & (new <= route.up_to_tokens))
            total += within
            taken += within * (route.source == source and decode in (None, route.decode))
        return taken / np.maximum(total, 1e-12) if plan.routes else otherwise

    def path(profile: Profile, part: FloatArray, egress: float, num_servers: float) -> _Path:
        sent = part > 0
        seconds = profile.prefill.at(new[sent], cached[sent])
        return _Path((weights * part)[sent], seconds, kv.many(new[sent]) / egress, num_servers)

    paths = []
    for cluster, share in zip(deployment.prfaas, plan.remote_shares, strict=True):
        part = shares(cluster.name, None, long * share)
        paths.append(path(cluster.profile, part, deployment.egress(cluster), cluster.num_instances))
    for pd, split, share in zip(deployment.pd, plan.splits, plan.local_shares, strict=True):
        paths.append(path(pd.profile, shares(None, pd.name, (1.0 - long) * share), math.inf, split.num_prefill))
    return paths


def _queue(path: _Path, seconds: FloatArray, num_servers: float, arrivals_per_second: float) -> QueueModel:
    """Return the queue before `num_servers` that serve each request of a path for `seconds`."""
    share = float(path.weights.sum())
    mean = float(path.weights @ seconds) / share
    square = float(path.weights @ seconds**2) / share
    squared_cv = max(square / mean**2 - 1.0, 0.0) if mean else 0.0
    return QueueModel(num_servers, arrivals_per_second * share, mean, squared_cv)


def _decode_wait(plan: Plan, deployment: Deployment, workload: Workload, arrivals_per_second: float) -> float:
    """Return the mean wait for a place in a decode batch; all PD clusters count as one."""
    places = served = 0.0
    for pd, split in zip(deployment.pd, plan.splits, strict=True):
        capacity = decode_capacity(pd, deployment, workload)
        places += split.num_decode * capacity.max_batch
        served += split.num_decode / capacity.request_seconds(workload.output.mean)
    if not served:
        return math.inf
    return QueueModel(places, arrivals_per_second, places / served, workload.output.squared_cv).mean_wait_seconds


def _transfer_delays(path: _Path, prefill: QueueModel) -> FloatArray:
    """Return equally likely delays of each transfer by the others on the link, [quantile, request]."""
    if not path.transfer.any():
        return np.zeros((1, len(path.transfer)))
    alone = _queue(path, path.transfer, 1, prefill.arrivals_per_second / float(path.weights.sum()))
    # Departures vary less than arrivals over short times only. A busy link's queue remembers long ones.
    long_term = alone.relaxation_seconds / (alone.relaxation_seconds + _FORGETTING * prefill.relaxation_seconds)
    squared_cv = prefill.departures_squared_cv * (1.0 - long_term) + long_term
    return SharedLink(alone.arrivals_per_second, alone.mean_seconds, alone.squared_cv, squared_cv).delays(path.transfer)


def _queued_quantile(waits: list[tuple[_Path, QueueModel, FloatArray]], quantile: float) -> float:
    """Return x with P(TTFT > x) = 1 − quantile, by bisection."""
    total = sum(float(path.weights.sum()) for path, _, _ in waits)

    def beyond(seconds: float) -> float:
        tails = (path.weights @ queue.tail(seconds - served).mean(axis=0) for path, queue, served in waits)
        return float(sum(tails)) / total

    low, high = 0.0, max(float(served.max()) + 50 * queue.mean_wait_seconds for _, queue, served in waits)
    for _ in range(26):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if beyond(middle) > 1 - quantile else (low, middle)
    return high
