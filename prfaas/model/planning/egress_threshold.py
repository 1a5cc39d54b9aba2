"""Threshold at a price of egress: a prompt leaves if its KV costs less than the local prefill that it saves."""

import math

import numpy as np

from prfaas.model.capacity.loads import LoadModel
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment
from prfaas.model.planning.many_pd import ManyPd
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.planner import is_single
from prfaas.model.planning.single_pd import SinglePd, first_at_least

UTILISATION = 0.8  # Share of what a plan sustains that its requests may be.
_NUM_LENGTHS = 96
_BYTES_PER_GB, _SECONDS_PER_HOUR = 1e9, 3600.0


def prices_per_gb(deployment: Deployment, hour: float) -> tuple[float, ...]:
    """Return the price of each PrfaaS cluster's egress at an hour of the day; 0 without a price."""
    return tuple(cluster.egress_price.at(hour) if cluster.egress_price else 0.0 for cluster in deployment.prfaas)


def at_egress_price(
    plan: Plan, deployment: Deployment, workload: Workload, *, hour: float, requests_per_second: float
) -> Plan:
    """Return the plan with the threshold that the price of this hour calls for, never below the plan's own.

    Instances without a price are worth nothing, so then as little leaves as possible. The threshold rises only as long
    as the plan sustains the requests.
    """
    per_gb = float(np.dot(prices_per_gb(deployment, hour), plan.remote_shares))
    if not per_gb:
        return plan
    loads = LoadModel(deployment, workload)
    low = loads.everything_offloaded if plan.threshold_tokens is None else plan.threshold_tokens
    wanted = _least_worth_sending(plan, deployment, per_gb, low, loads.nothing_offloaded)
    if wanted <= low:
        return plan
    enough = requests_per_second / UTILISATION or math.ulp(0.0)
    splits = [split.num_prefill for split in plan.splits]

    def at(threshold: int) -> Plan:
        return (
            SinglePd(loads).at(threshold, splits[0]) if is_single(deployment) else ManyPd(loads).at(threshold, splits)
        )

    greatest = first_at_least(lambda t: at(t).system_throughput < enough, low, wanted + 1) - 1
    return plan if greatest <= low else at(greatest)


def _least_worth_sending(plan: Plan, deployment: Deployment, per_gb: float, low: int, high: int) -> int:
    """Return the least threshold above which each prompt is worth its egress; `high` if the longest is not."""
    lengths = np.geomspace(max(low, 1), max(high, 2), _NUM_LENGTHS)
    shares = zip(deployment.pd, plan.local_shares, strict=True)
    local = [(pd.profile.prefill, (pd.price_per_hour or 0.0) * share / _SECONDS_PER_HOUR) for pd, share in shares]
    saved = np.array([sum(price * prefill.seconds(length) for prefill, price in local) for length in lengths])
    paid = np.array([deployment.model.kv_bytes(length) for length in lengths]) * per_gb / _BYTES_PER_GB
    dear = np.flatnonzero(saved < paid)
    return int(lengths[dear[-1]]) if len(dear) else low
