"""Instances that the measured arrivals need, for autoscalers."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment
from prfaas.model.planning.fleet import Demand, cheapest_fleet, is_fast_enough
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.planner import best_plan, is_single


def needed_instances(
    deployment: Deployment, workload: Workload, arrivals_per_second: float
) -> dict[str, dict[str, int]]:
    """Return instances by cluster and role of a cheap fleet that serves the arrivals within the objectives.

    With one PD cluster, it is the cheapest fleet. The deployment's own numbers are the most that a fleet may have. If
    they do not suffice, all of them are returned. Without a price for each cluster, all instances cost the same. The
    result is empty without arrivals and with instances of both roles.
    """
    if not arrivals_per_second or not deployment.pd or any(cluster.shared_instances for cluster in deployment.pd):
        return {}
    if deployment.price_per_hour is None:
        deployment = replace(
            deployment,
            prfaas=tuple([replace(cluster, price_per_hour=1.0) for cluster in deployment.prfaas]),
            pd=tuple([replace(cluster, price_per_hour=1.0) for cluster in deployment.pd]),
        )
    largest = sized(deployment, {cluster.name: cluster.num_instances for cluster in deployment.clusters})
    fleet, plan = _fleet(largest, workload, Demand(arrivals_per_second))
    needed = {cluster.name: {"prefill": 0} for cluster in deployment.prfaas}
    needed |= {cluster.name: {"prefill": cluster.num_instances} for cluster in fleet.prfaas}
    for split in plan.splits:
        needed[split.cluster] = {"prefill": round(split.num_prefill), "decode": round(split.num_decode)}
    return needed


def _fleet(largest: Deployment, workload: Workload, demand: Demand) -> tuple[Deployment, Plan]:
    """Return a cheap fleet that serves the demand with its plan, or the largest one if none does."""
    if is_single(largest):
        cheapest = cheapest_fleet(largest, workload, demand, growth=1)
        return (cheapest.deployment, cheapest.plan) if cheapest else (largest, best_plan(largest, workload))
    names = [cluster.name for cluster in largest.clusters]
    fleets = [_without_spares(largest, workload, demand, order) for order in (names, names[::-1])]
    fleet = min(fleets, key=lambda deployment: deployment.price_per_hour or 0.0)
    plan = best_plan(fleet, workload)
    while not _serves(fleet, plan, workload, demand):
        larger = [grown for name in names if (grown := _grown(fleet, name, largest)) is not None]
        if not larger:
            break
        fleet = max(larger, key=lambda deployment: best_plan(deployment, workload).system_throughput)
        plan = best_plan(fleet, workload)
    return fleet, plan


def _without_spares(largest: Deployment, workload: Workload, demand: Demand, order: Sequence[str]) -> Deployment:
    """Return the fleet after taking all spare instances from one cluster after another."""
    counts = {cluster.name: cluster.num_instances for cluster in largest.clusters}
    pd = {cluster.name for cluster in largest.pd}

    def sustains(name: str, count: int) -> bool:
        plan = best_plan(sized(largest, {**counts, name: count}), workload)
        return plan.system_throughput >= demand.capacity

    for name in order:
        choices = range(1 if name in pd else 0, counts[name])
        counts[name] = choices.start + bisect_left(choices, True, key=partial(sustains, name))
    return sized(largest, counts)


def _serves(fleet: Deployment, plan: Plan, workload: Workload, demand: Demand) -> bool:
    return plan.system_throughput >= demand.capacity and is_fast_enough(fleet, plan, workload, demand)


def _grown(fleet: Deployment, name: str, largest: Deployment) -> Deployment | None:
    """Return the fleet with one more instance in a cluster, or None if it has all."""
    counts = {cluster.name: 0 for cluster in largest.clusters}
    counts |= {cluster.name: cluster.num_instances for cluster in fleet.clusters}
    limit = next(cluster.num_instances for cluster in largest.clusters if cluster.name == name)
    return sized(largest, {**counts, name: counts[name] + 1}) if counts[name] < limit else None


def sized(deployment: Deployment, counts: Mapping[str, int]) -> Deployment:
    """Return the deployment with these numbers of instances and free splits. Empty PrfaaS clusters have no paths."""
    prfaas = tuple([replace(item, num_instances=counts[item.name]) for item in deployment.prfaas if counts[item.name]])
    pd = tuple([replace(item, num_instances=counts[item.name], num_prefill=None) for item in deployment.pd])
    kept = {cluster.name for cluster in prfaas}
    paths = tuple([path for path in deployment.paths if path.source in kept])
    return replace(deployment, prfaas=prfaas, pd=pd, paths=paths)
