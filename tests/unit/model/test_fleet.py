"""Cheapest fleets: equal to brute force, less egress at higher prices, and no PrfaaS cluster where it does not pay."""

import itertools
from dataclasses import replace

import pytest

from prfaas.errors import ConfigError
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.cost.egress_price import EgressPrice, Period
from prfaas.model.cost.lengths import Lengths
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment, Objectives
from prfaas.model.planning.fleet import Demand, Fleet, cheapest_day, cheapest_fleet, greatest_demand
from prfaas.model.planning.single_pd import SinglePd
from tests.support.planner_inputs import case_study, profile, small_deployment, workload


def priced(deployment: Deployment, *, remote: float, local: float, egress: EgressPrice) -> Deployment:
    prfaas = tuple(replace(each, price_per_hour=remote, egress_price=egress) for each in deployment.prfaas)
    pd = tuple(replace(each, price_per_hour=local) for each in deployment.pd)
    return replace(deployment, prfaas=prfaas, pd=pd)


def case_study_fleet(per_gb: float, *, only_local: bool = False) -> Fleet:
    deployment, traffic = case_study()
    deployment = priced(deployment, remote=24.0, local=12.0, egress=EgressPrice(per_gb))
    found = cheapest_fleet(deployment, traffic, Demand(2.0), only_local=only_local)
    assert found is not None
    return found


def test_egress_falls_as_its_price_rises_until_all_local_is_cheapest() -> None:
    found = [case_study_fleet(price) for price in (0.0, 0.02, 0.05, 0.09, 1.0)]
    sent = [fleet.egress_bytes_per_second for fleet in found]
    costs = [fleet.per_hour for fleet in found]
    assert sent == sorted(sent, reverse=True)
    assert costs == sorted(costs)
    assert sent[0] > 0 == sent[-1]
    assert not found[-1].deployment.prfaas
    assert found[-1].per_hour == case_study_fleet(1.0, only_local=True).per_hour


def brute_force(deployment: Deployment, traffic: Workload, demand: Demand, *, growth: int) -> float:
    (remote,), (pd,), best = deployment.prfaas, deployment.pd, float("inf")
    for away, local in itertools.product(
        range(growth * remote.num_instances + 1), range(1, growth * pd.num_instances + 1)
    ):
        prfaas = (replace(remote, num_instances=away),) if away else ()
        loads = LoadModel(replace(deployment, prfaas=prfaas, pd=(replace(pd, num_instances=local),)), traffic)
        solver = SinglePd(loads)
        thresholds = [loads.everything_offloaded, *loads.lengths.points(64)[0]] if away else [loads.nothing_offloaded]
        for threshold, count in itertools.product(thresholds, range(local + 1)):
            if solver.sustained(threshold, count) >= demand.capacity:
                sent = demand.requests_per_second * loads.at(threshold).remote_bytes
                egress = remote.egress_price.per_hour(sent) if remote.egress_price else 0.0
                best = min(best, away * (remote.price_per_hour or 0) + local * (pd.price_per_hour or 0) + egress)
    return best


@pytest.mark.parametrize("per_gb", [0.0, 0.02, 0.2, 5.0])
@pytest.mark.parametrize("rate", [0.3, 1.0, 2.0])
def test_the_cheapest_fleet_equals_brute_force(per_gb: float, rate: float) -> None:
    deployment = small_deployment(profile(0.3, 4e-5, 1e-10), profile(0.4, 1.3e-4, 2.8e-10), num_prfaas=2, num_pd=3)
    deployment = priced(deployment, remote=20.0, local=12.0, egress=EgressPrice(per_gb))
    traffic = workload(Lengths([500, 2_000, 7_000, 20_000, 45_000, 90_000]))
    found = cheapest_fleet(deployment, traffic, Demand(rate))
    assert found is not None
    assert found.per_hour == pytest.approx(brute_force(deployment, traffic, Demand(rate), growth=3))


def test_a_ttft_objective_costs_instances() -> None:
    deployment, traffic = case_study()
    deployment = priced(deployment, remote=24.0, local=12.0, egress=EgressPrice(0.02))
    hurried = replace(deployment, objectives=Objectives(40.0, 4.5, 0.9))
    free, bound = (cheapest_fleet(each, traffic, Demand(2.0)) for each in (deployment, hurried))
    assert free is not None and bound is not None
    assert bound.per_hour > free.per_hour


def test_a_fleet_without_prices_is_refused() -> None:
    deployment, traffic = case_study()
    free = replace(deployment, pd=(replace(deployment.pd[0], price_per_hour=None),))
    with pytest.raises(ConfigError, match="price"):
        cheapest_fleet(free, traffic, Demand(2.0))


def test_prices_follow_the_hour_of_the_day() -> None:
    price = EgressPrice(0.05, (Period(22.0, 6.0, 0.02),))
    at = [price.per_hour(1e9 / 3600, hour=hour) for hour in (0, 5.9, 6, 21.9, 22)]
    assert at == pytest.approx([0.02, 0.02, 0.05, 0.05, 0.02])
    assert price.per_hour(1e9 / 3600) == pytest.approx((8 * 0.02 + 16 * 0.05) / 24)


COMMITTED = EgressPrice(0.0, per_gbps_month=730.0)


def test_day_of_equal_hours_costs_as_much_as_each_of_them() -> None:
    deployment, traffic = case_study()
    deployment = priced(deployment, remote=24.0, local=12.0, egress=EgressPrice(0.005))
    day = cheapest_day(deployment, traffic, [Demand(2.0, hour=0.0, hours=8.0), Demand(2.0, hour=8.0, hours=16.0)])
    assert day is not None
    assert day.per_hour == pytest.approx(case_study_fleet(0.005).per_hour)


@pytest.mark.parametrize(("peak_hours", "counts"), [(1.0, False), (2.0, True)])
def test_peak_within_a_twentieth_of_the_day_is_no_commitment(peak_hours: float, counts: bool) -> None:
    deployment, traffic = case_study()
    deployment = priced(deployment, remote=24.0, local=12.0, egress=COMMITTED)
    demands = [Demand(2.0, hour=0.0, hours=peak_hours), Demand(0.3, hour=peak_hours, hours=24.0 - peak_hours)]
    day = cheapest_day(deployment, traffic, demands)
    assert day is not None
    peak, quiet = day.parts
    assert peak.committed_per_hour == pytest.approx(peak.egress_bytes_per_second / 125e6)
    assert day.egress_per_hour == pytest.approx(peak.committed_per_hour if counts else quiet.committed_per_hour)


def test_budget_buys_what_a_demand_of_this_price_costs() -> None:
    deployment, traffic = case_study()
    deployment = priced(deployment, remote=24.0, local=12.0, egress=EgressPrice(0.005))
    spent = case_study_fleet(0.005).per_hour
    day, poor = (greatest_demand(deployment, traffic, budget, utilisation=0.8) for budget in (spent, 11.0))
    assert poor is None
    assert day is not None
    assert day.demands[0].requests_per_second >= 2.0 * (1 - 2e-3)
    assert day.per_hour <= spent
