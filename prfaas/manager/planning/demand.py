"""Instances that the measured arrivals need, for autoscalers."""

from __future__ import annotations

from dataclasses import replace

from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment
from prfaas.model.planning.fleet import Demand, cheapest_fleet
from prfaas.model.planning.planner import best_plan


def needed_instances(
    deployment: Deployment, workload: Workload, arrivals_per_second: float
) -> dict[str, dict[str, int]]:
    """Return instances by cluster and role of the cheapest fleet that serves the arrivals within the objectives.

    The deployment's own numbers are the most that a fleet may have. If they do not suffice, all of them are returned.
    Without a price for each cluster, all instances cost the same. The result is empty without arrivals and with
    several PD clusters.
    """
    if not arrivals_per_second or len(deployment.pd) != 1 or deployment.pd[0].shared_instances:
        return {}
    if deployment.price_per_hour is None:
        deployment = replace(
            deployment,
            prfaas=tuple([replace(cluster, price_per_hour=1.0) for cluster in deployment.prfaas]),
            pd=tuple([replace(cluster, price_per_hour=1.0) for cluster in deployment.pd]),
        )
    fleet = cheapest_fleet(deployment, workload, Demand(arrivals_per_second), growth=1)
    if fleet is not None:
        clusters, plan = fleet.deployment.prfaas, fleet.plan
    else:
        free = tuple([replace(cluster, num_prefill=None) for cluster in deployment.pd])
        clusters, plan = deployment.prfaas, best_plan(replace(deployment, pd=free), workload)
    needed = {cluster.name: {"prefill": 0} for cluster in deployment.prfaas}
    needed |= {cluster.name: {"prefill": cluster.num_instances} for cluster in clusters}
    for split in plan.splits:
        needed[split.cluster] = {"prefill": round(split.num_prefill), "decode": round(split.num_decode)}
    return needed
