"""Cheapest fleet for a demand: instances of each cluster, roles and threshold, with the price of egress."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from prfaas.errors import ConfigError
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.capacity.ttft import estimate_ttft
from prfaas.model.cost.egress_price import DAY_HOURS
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.planner import is_single
from prfaas.model.planning.single_pd import SinglePd


@dataclass(frozen=True)
class Demand:
    """Requests per second to serve, and the share of what a fleet sustains that they may be.

    They arrive in so many `hours` of the day, at the egress prices of the first one; None takes their mean.
    """

    requests_per_second: float
    utilisation: float = 0.8
    hour: float | None = None
    hours: float = DAY_HOURS

    @property
    def capacity(self) -> float:
        """Return the requests per second that a fleet must sustain."""
        return self.requests_per_second / self.utilisation


@dataclass(frozen=True)
class Fleet:
    """Deployment with its plan, and what it costs an hour at the demand.

    `committed_per_hour` is the price of the rate, if this rate is the day's 95th percentile.
    """

    deployment: Deployment
    plan: Plan
    instances_per_hour: float
    egress_per_hour: float
    egress_bytes_per_second: float
    committed_per_hour: float = 0.0

    @property
    def per_hour(self) -> float:
        """Return the whole price of an hour if each hour is like this."""
        return self.instances_per_hour + self.egress_per_hour + self.committed_per_hour


@dataclass(frozen=True)
class Day:
    """The same instances through a day of several demands; roles and thresholds follow the demand."""

    demands: tuple[Demand, ...]
    parts: tuple[Fleet, ...]

    @property
    def instances_per_hour(self) -> float:
        """Return the price of all instances for an hour."""
        return self.parts[0].instances_per_hour

    @property
    def egress_per_hour(self) -> float:
        """Return the mean price of the egress for an hour, with the day's 95th percentile."""
        pairs = list(zip(self.demands, self.parts, strict=True))
        metered = sum(demand.hours * part.egress_per_hour for demand, part in pairs) / DAY_HOURS
        left, committed = 0.05 * DAY_HOURS, 0.0
        for demand, part in sorted(pairs, key=lambda pair: -pair[1].egress_bytes_per_second):
            committed = part.committed_per_hour
            left -= demand.hours
            if left < 0:
                break
        return metered + committed

    @property
    def per_hour(self) -> float:
        """Return the mean price of an hour."""
        return self.instances_per_hour + self.egress_per_hour

    @property
    def resized_per_hour(self) -> float:
        """Return the mean price of an hour if the parts are fleets of their own, which cost nothing outside their hours."""
        pairs = zip(self.demands, self.parts, strict=True)
        return sum(demand.hours * part.instances_per_hour for demand, part in pairs) / DAY_HOURS + self.egress_per_hour


def cheapest_fleet(
    deployment: Deployment, workload: Workload, demand: Demand, *, only_local: bool = False, growth: int = 3
) -> Fleet | None:
    """Return the cheapest fleet that serves one demand, as in `cheapest_day`."""
    day = cheapest_day(deployment, workload, [demand], only_local=only_local, growth=growth)
    return None if day is None else day.parts[0]


def cheapest_day(
    deployment: Deployment, workload: Workload, demands: Sequence[Demand], *, only_local: bool = False, growth: int = 3
) -> Day | None:
    """Return the cheapest fleet that serves all demands of a day within the objectives; None if none does.

    Each cluster may have up to `growth` times its instances; a PrfaaS cluster may have none. `only_local` leaves out
    all PrfaaS clusters.

    Raises:
        ConfigError: there are several PD clusters, or an instance has no price.
    """
    best: Day | None = None
    # A fleet that cannot serve the greatest demand is left at once.
    order = sorted(demands, key=lambda demand: -demand.requests_per_second)
    for fleet, price in _fleets(deployment, growth=growth, only_local=only_local):
        # Fleets ascend by the price of their instances, which is the least that they cost.
        if best is not None and price >= best.per_hour:
            break
        loads, parts = LoadModel(fleet, workload), []
        for demand in order:
            part = _cheapest_plan(loads, demand)
            if part is None:
                break
            parts.append(part)
        if len(parts) == len(order):
            day = Day(tuple(order), tuple(parts))
            best = day if best is None or day.per_hour < best.per_hour else best
    return best


def resized_day(deployment: Deployment, workload: Workload, demands: Sequence[Demand]) -> Day:
    """Return the cheapest fleet of each demand, as if it lasted all day; some fleet serves all of them."""
    found = [cheapest_fleet(deployment, workload, replace(demand, hours=DAY_HOURS)) for demand in demands]
    return Day(tuple(demands), tuple(fleet for fleet in found if fleet is not None))


def greatest_demand(
    deployment: Deployment, workload: Workload, budget_per_hour: float, *, utilisation: float, only_local: bool = False
) -> Day | None:
    """Return the most requests per second that instances and egress within a budget serve; None if none fit.

    The fleets and errors are those of `cheapest_day`.
    """
    best: Day | None = None
    for fleet, price in _fleets(deployment, growth=3, only_local=only_local):
        if price > budget_per_hour:
            break
        loads = LoadModel(fleet, workload)
        low, high = (
            best.demands[0].requests_per_second if best else 0.0,
            SinglePd(loads).plan().system_throughput * utilisation,
        )
        while high - low > 1e-3 * high:
            demand = Demand((low + high) / 2, utilisation)
            found = _cheapest_plan(loads, demand)
            if found is not None and found.per_hour <= budget_per_hour:
                best, low = Day((demand,), (found,)), demand.requests_per_second
            else:
                high = demand.requests_per_second
    return best


def _fleets(deployment: Deployment, *, growth: int, only_local: bool) -> Iterator[tuple[Deployment, float]]:
    """Yield each choice of numbers of instances with its price, ascending by price."""
    if not is_single(deployment) or deployment.pd[0].shared_instances:
        raise ConfigError("--demand, --budget: one PD cluster, without shared instances or tenants")
    if deployment.price_per_hour is None:
        raise ConfigError("--demand, --budget: each cluster needs a price")
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


def _cheapest_plan(loads: LoadModel, demand: Demand) -> Fleet | None:
    """Return the fleet with the roles and the threshold that send least and still serve the demand."""
    fleet, workload, solver = loads.deployment, loads.workload, SinglePd(loads)
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
    egress, committed = egress_costs(fleet, plan, sent, hour=demand.hour)
    return Fleet(fleet, plan, fleet.price_per_hour or 0.0, egress, sent, committed)


def egress_costs(deployment: Deployment, plan: Plan, rate: float, *, hour: float | None = None) -> tuple[float, float]:
    """Return what an hour of a plan's egress in bytes per second costs by GB, and as a 95th percentile."""
    egress = committed = 0.0
    for cluster, share in zip(deployment.prfaas, plan.remote_shares, strict=True):
        if cluster.egress_price is not None:
            egress += cluster.egress_price.per_hour(rate * share, hour=hour)
            committed += cluster.egress_price.committed_per_hour(rate * share)
    return egress, committed


def is_fast_enough(deployment: Deployment, plan: Plan, workload: Workload, demand: Demand) -> bool:
    """Return whether a plan's time to first token is within the objective at the demand."""
    objectives = deployment.objectives
    if objectives.ttft_seconds is None:
        return True
    reached = estimate_ttft(
        plan, deployment, workload, arrivals_per_second=demand.requests_per_second, quantile=objectives.ttft_quantile
    )
    return reached.quantile_seconds <= objectives.ttft_seconds
