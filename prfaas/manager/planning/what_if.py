"""Questions to the solver: the deployment and the traffic as they are now, with other numbers of instances, splits, rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prfaas.model.capacity.ttft import with_queueing
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment, PdCluster, PrfaasCluster
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.planner import best_plan

MAX_INSTANCES = 100_000
MAX_PER_SECOND = 1e15


@dataclass(frozen=True)
class Present:
    """What a question starts from."""

    deployment: Deployment
    workload: Workload
    source: str  # of the workload, in words
    arrivals_per_second: float  # measured; 0: unknown


def form(present: Present) -> dict[str, Any]:
    """What can be asked, with the present values; a rate of None is no limit."""
    its = present.deployment
    return {
        "source": present.source,
        "arrivals_per_second": present.arrivals_per_second,
        "clusters": [
            *(
                {"name": cluster.name, "kind": "prfaas", "instances": cluster.num_instances, **_rate(its, cluster)}
                for cluster in its.prfaas
            ),
            *(
                {"name": one.name, "kind": "pd", "instances": one.num_instances, "num_prefill": one.num_prefill}
                for one in its.pd
            ),
        ],
    }


def _rate(deployment: Deployment, cluster: PrfaasCluster) -> dict[str, float | None]:
    egress = deployment.egress(cluster)
    return {"egress_bytes_per_second": egress if math.isfinite(egress) else None}


def answer(present: Present, question: Mapping[str, Any]) -> dict[str, Any]:
    """The plan for things as they are, and the one for `question`: `arrivals_per_second`, and under `clusters` by name
    `instances`, `num_prefill` (None: the best) and `egress_bytes_per_second` (None: no limit). What is left out stays.

    Raises:
        ValueError: the question is none, or the deployment cannot be solved.
    """
    if not present.deployment.pd:
        raise ValueError("no PD cluster of the deployment's file is alive")
    arrivals = _number(question, "arrivals_per_second", present.arrivals_per_second, MAX_PER_SECOND) or 0.0
    changed = _changed(present.deployment, question.get("clusters", {}))
    today = replace(present, arrivals_per_second=present.arrivals_per_second or arrivals)
    return {
        "today": _solved(today),
        "what_if": _solved(replace(present, deployment=changed, arrivals_per_second=arrivals)),
        "source": present.source,
    }


def _changed(deployment: Deployment, asked: Any) -> Deployment:
    if not isinstance(asked, dict) or not all(isinstance(its, dict) for its in asked.values()):
        raise ValueError("clusters: names with what changes")
    unknown = asked.keys() - {cluster.name for cluster in deployment.clusters}
    if unknown:
        raise ValueError(f"clusters: {sorted(unknown)[0]!r} is not alive")
    prfaas = tuple(_prfaas(cluster, asked.get(cluster.name, {})) for cluster in deployment.prfaas)
    changed = replace(deployment, prfaas=prfaas, pd=tuple(_pd(its, asked.get(its.name, {})) for its in deployment.pd))
    for its in deployment.prfaas:
        if "egress_bytes_per_second" in asked.get(its.name, {}):
            changed = _with_egress(changed, its.name, before=deployment.egress(its))
    return changed


def _prfaas(cluster: PrfaasCluster, asked: Mapping[str, Any]) -> PrfaasCluster:
    egress = cluster.egress_bytes_per_second
    if "egress_bytes_per_second" in asked:
        given = _number(asked, "egress_bytes_per_second", None, MAX_PER_SECOND)
        egress = math.inf if given is None else given
    return replace(
        cluster, num_instances=_count(asked, "instances", cluster.num_instances), egress_bytes_per_second=egress
    )


def _pd(cluster: PdCluster, asked: Mapping[str, Any]) -> PdCluster:
    instances = _count(asked, "instances", cluster.num_instances)
    num_prefill = _count(asked, "num_prefill", cluster.num_prefill)
    if instances < 1 or (num_prefill is not None and num_prefill >= max(2, instances)):
        raise ValueError(f"{cluster.name}: an instance must be left to decode")
    shared = min(cluster.shared_instances, instances)
    return replace(cluster, num_instances=instances, num_prefill=num_prefill, shared_instances=shared)


def _with_egress(deployment: Deployment, name: str, *, before: float) -> Deployment:
    """The links of a cluster as wide, in the same proportions, as its egress is now."""
    cluster = next(cluster for cluster in deployment.prfaas if cluster.name == name)
    after = cluster.egress_bytes_per_second
    share = after / before if before and math.isfinite(before) else math.inf
    links = tuple(
        replace(link, bytes_per_second=link.bytes_per_second * share if link.bytes_per_second else 0.0)
        if link.source == name
        else link
        for link in deployment.links
    )
    return replace(deployment, links=links)


def _solved(its: Present) -> dict[str, Any]:
    plan = best_plan(its.deployment, its.workload, method="exact")
    return {
        "threshold_tokens": plan.threshold_tokens,
        "offload_ratio": plan.offload_ratio,
        "requests_per_second": plan.system_throughput,
        "limit": plan.limit,
        "splits": {split.cluster: [split.num_prefill, split.num_decode] for split in plan.splits},
        "egress_bytes_per_second": plan.egress_bytes_per_second,
        "arrivals_per_second": its.arrivals_per_second,
        "ttft_seconds": mean_ttft_seconds(plan, its.deployment, its.workload, its.arrivals_per_second),
    }


def mean_ttft_seconds(
    plan: Plan, deployment: Deployment, workload: Workload, arrivals_per_second: float
) -> float | None:
    """The mean TTFT with queues; None without arrivals, and where the queues have no end."""
    if not arrivals_per_second:
        return None
    seconds = with_queueing(plan, deployment, workload, arrivals_per_second=arrivals_per_second).mean_seconds
    return seconds if math.isfinite(seconds) else None


def _count(asked: Mapping[str, Any], key: str, default: Any) -> Any:
    value = asked.get(key, default)
    if value is not None and (type(value) is not int or not 0 <= value <= MAX_INSTANCES):
        raise ValueError(f"{key}: a whole number up to {MAX_INSTANCES:,}")
    if value is None and key == "instances":
        raise ValueError(f"{key}: a whole number up to {MAX_INSTANCES:,}")
    return value


def _number(asked: Mapping[str, Any], key: str, default: float | None, largest: float) -> float | None:
    value = asked.get(key, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= largest:
        raise ValueError(f"{key}: a number from 0 to {largest:g}")
    return float(value)
