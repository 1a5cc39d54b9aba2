"""What-if questions to the solver: the present deployment and traffic with other instances, splits and rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prfaas.model.capacity.ttft import estimate_ttft
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment, PdCluster, PrfaasCluster
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.planner import best_plan

MAX_INSTANCES = 100_000
MAX_PER_SECOND = 1e15


@dataclass(frozen=True)
class Present:
    """Present deployment and traffic, from which a question starts."""

    deployment: Deployment
    workload: Workload
    source: str  # Source of the workload, in words.
    arrivals_per_second: float  # Measured; 0 while unknown.


def form(present: Present) -> dict[str, Any]:
    """Return the present values of every input that a question can change. A rate of None means no limit."""
    deployment = present.deployment
    return {
        "source": present.source,
        "arrivals_per_second": present.arrivals_per_second,
        "clusters": [
            *(
                {
                    "name": cluster.name,
                    "kind": "prfaas",
                    "instances": cluster.num_instances,
                    **_rate(deployment, cluster),
                }
                for cluster in deployment.prfaas
            ),
            *(
                {
                    "name": cluster.name,
                    "kind": "pd",
                    "instances": cluster.num_instances,
                    "num_prefill": cluster.num_prefill,
                }
                for cluster in deployment.pd
            ),
        ],
    }


def _rate(deployment: Deployment, cluster: PrfaasCluster) -> dict[str, float | None]:
    egress = deployment.egress(cluster)
    return {"egress_bytes_per_second": egress if math.isfinite(egress) else None}


def answer(present: Present, question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan for the present state and the plan for `question`.

    The question has `arrivals_per_second` and `clusters`. Each cluster name maps to `instances`, `num_prefill` (None:
    the best) and `egress_bytes_per_second` (None: no limit). Omitted values stay.

    Raises:
        ValueError: the question is malformed, or the deployment cannot be solved.
    """
    if not present.deployment.pd:
        raise ValueError("no PD cluster of the deployment file is alive")
    arrivals = _number(question, "arrivals_per_second", present.arrivals_per_second, MAX_PER_SECOND) or 0.0
    changed = _changed(present.deployment, question.get("clusters", {}))
    today = replace(present, arrivals_per_second=present.arrivals_per_second or arrivals)
    return {
        "today": _solved(today),
        "what_if": _solved(replace(present, deployment=changed, arrivals_per_second=arrivals)),
        "source": present.source,
    }


def _changed(deployment: Deployment, asked: Any) -> Deployment:
    if not isinstance(asked, dict) or not all(isinstance(change, dict) for change in asked.values()):
        raise ValueError("clusters: expected an object of clusters and their changes")
    unknown = asked.keys() - {cluster.name for cluster in deployment.clusters}
    if unknown:
        raise ValueError(f"clusters: {sorted(unknown)[0]!r} is not alive")
    prfaas = tuple(_prfaas(cluster, asked.get(cluster.name, {})) for cluster in deployment.prfaas)
    changed = replace(
        deployment, prfaas=prfaas, pd=tuple(_pd(cluster, asked.get(cluster.name, {})) for cluster in deployment.pd)
    )
    for cluster in deployment.prfaas:
        if "egress_bytes_per_second" in asked.get(cluster.name, {}):
            changed = _with_egress(changed, cluster.name, before=deployment.egress(cluster))
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
    """Scale the links of a cluster to its new egress."""
    cluster = next(cluster for cluster in deployment.prfaas if cluster.name == name)
    after = cluster.egress_bytes_per_second
    share = after / before if before and math.isfinite(before) else math.inf
    paths = tuple(
        replace(path, bytes_per_second=path.bytes_per_second * share if path.bytes_per_second else 0.0)
        if path.source == name
        else path
        for path in deployment.paths
    )
    return replace(deployment, paths=paths)


def _solved(present: Present) -> dict[str, Any]:
    plan = best_plan(present.deployment, present.workload, method="exact")
    return {
        "threshold_tokens": plan.threshold_tokens,
        "offload_ratio": plan.offload_ratio,
        "requests_per_second": plan.system_throughput,
        "limit": plan.limit,
        "splits": {split.cluster: [split.num_prefill, split.num_decode] for split in plan.splits},
        "egress_bytes_per_second": plan.egress_bytes_per_second,
        "arrivals_per_second": present.arrivals_per_second,
        "ttft_seconds": mean_ttft_seconds(plan, present.deployment, present.workload, present.arrivals_per_second),
    }


def mean_ttft_seconds(
    plan: Plan, deployment: Deployment, workload: Workload, arrivals_per_second: float
) -> float | None:
    """Return the mean TTFT with queueing, or None without arrivals and if the queues grow without bound."""
    if not arrivals_per_second:
        return None
    seconds = estimate_ttft(plan, deployment, workload, arrivals_per_second=arrivals_per_second).mean_seconds
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
