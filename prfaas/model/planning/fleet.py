"""Cheapest fleet for a demand: instances of each cluster, roles and threshold, with the price of egress."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from prfaas.errors import ConfigError
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.capacity.ttft import estimate_ttft
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.planner import is_single
from prfaas.model.planning.single_pd import SinglePd


@dataclass(frozen=True)
class Demand:
    """Requests per second to serve, and the share of what a fleet sustains that they may be.

    `hour` is the hour of the day whose egress prices count; None takes their mean.
    """

    requests_per_second: float
    utilisation: float = 0.8
    hour: float | None = None

    @property
    def capacity(self) -> float:
        """Return the requests per second that a fleet must sustain."""
        return self.requests_per_second / self.utilisation


@dataclass(frozen=True)
class Fleet:
    """Deployment with its plan, and what it costs an hour at the demand."""

    deployment: Deployment
    plan: Plan
    instances_per_hour: float
    egress_per_hour: float
    egress_bytes_per_second: float

    @property
    def per_hour(self) -> float:
        """Return the whole price of an hour."""
        return self.instances_per_hour + self.egress_per_hour


def cheapest_fleet(
    deployment: Deployment, workload: Workload, demand: Demand, *, only_local: bool = False, growth: int = 3
) -> Fleet | None:
    """Return the cheapest fleet that serves the demand within the objectives; None if none does.

    Each cluster may have up to `growth` times its instances; a PrfaaS cluster may have none. `only_local` leaves out
    all PrfaaS clusters.

    Raises:
        ConfigError: there are several PD clusters, or an instance has no price.
    """
    if not is_single(deployment) or deployment.pd[0].shared_instances:
        raise ConfigError("--demand: one PD cluster, without shared instances or tenants")
    if deployment.price_per_hour is None:
        raise ConfigError("--demand: each cluster needs a price")
    best: Fleet | None = None
    for fleet, price in _fleets(deployment, growth=growth, only_local=only_local):
        # Fleets ascend by the price of their instances, which is the least that they cost.
        if best is not None and price >= best.per_hour:
            break
        found = _cheapest_plan(fleet, workload, demand)
        if found is not None and (best is None or found.per_hour < best.per_hour):
            best = found
    return best


def _fleets(deployment: Deployment, *, growth: int, only_local: bool) -> Iterator[tuple[Deployment, float]]:
    """Yield each choice of numbers of instances with its price, ascending by price."""
    (pd,) = deployment.pd
    remote = [range(1 if only_local else growth * cluster.num_instances + 1) for cluster in deployment.prfaas]
    choices = []
    for counts in itertools.product(range(1, growth * pd.num_instances + 1), *remote):
        local, *others = counts
        pairs = zip(deployment.prfaas, others, strict=True)
        prfaas = tuple(replace(cluster, num_instances=count) for cluster, count in pairs if count)
        names = {cluster.name for cluster in prfaas}
        paths = tuple(path for path in deployment.paths if path.source in names)
        grown = replace(pd, num_instances=local, num_prefill=None)
        fleet = replace(deployment, prfaas=prfaas, pd=(grown,), paths=paths)
        choices.append((fleet, fleet.price_per_hour or 0.0))
    yield from sorted(choices, key=lambda choice: choice[1])


def _cheapest_plan(fleet: Deployment, workload: Workload, demand: Demand) -> Fleet | None:
    """Return the fleet with the roles and the threshold that send least and still serve the demand."""
    loads = LoadModel(fleet, workload)
    solver = SinglePd(loads)
    if solver.plan().system_throughput < demand.capacity:
        return None
    best: Fleet | None = None
    for num_prefill in range(fleet.pd[0].num_instances):
        if solver.decode(num_prefill) < demand.capacity:
            break
        threshold = solver.greatest_threshold(num_prefill, demand.capacity)
        if threshold is None:
            continue
        priced = _priced(fleet, solver.at(threshold, num_prefill), demand, loads.at(threshold).remote_bytes)
        if (best is None or priced.per_hour < best.per_hour) and is_fast_enough(fleet, priced.plan, workload, demand):
            best = priced
    return best


def _priced(fleet: Deployment, plan: Plan, demand: Demand, bytes_per_request: float) -> Fleet:
    sent = demand.requests_per_second * bytes_per_request
    egress = 0.0
    for cluster, share in zip(fleet.prfaas, plan.remote_shares, strict=True):
        if cluster.egress_price is not None:
            egress += cluster.egress_price.per_hour(sent * share, hour=demand.hour)
    return Fleet(fleet, plan, fleet.price_per_hour or 0.0, egress, sent)


def is_fast_enough(deployment: Deployment, plan: Plan, workload: Workload, demand: Demand) -> bool:
    """Return whether a plan's time to first token is within the objective at the demand."""
    objectives = deployment.objectives
    if objectives.ttft_seconds is None:
        return True
    reached = estimate_ttft(
        plan,
        deployment,
        workload,
        arrivals_per_second=demand.requests_per_second,
        quantile=objectives.ttft_quantile,
    )
    return reached.quantile_seconds <= objectives.ttft_seconds
