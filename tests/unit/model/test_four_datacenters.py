"""Two PrfaaS and two PD clusters: missing links, and tenants that are bound to a region."""

from dataclasses import replace

import pytest

from prfaas.model.capacity.bound import lp_bound, whole_bound
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.deployment import ClusterPath, Deployment, TenantShare
from prfaas.model.planning.planner import best_plan
from tests.support.planner_inputs import case_study

EAST = frozenset({"far-east", "east"})


def four_datacenters(
    num_prfaas: int, num_pd: int, link: float, *, down: str = "", bound_ratio: float = 0.0
) -> Deployment:
    """Return the case study in two regions. All links from `down` to the other region are down."""
    deployment, _ = case_study()
    (remote,), (local,) = deployment.prfaas, deployment.pd
    prfaas = tuple(replace(remote, name=name, num_instances=num_prfaas) for name in ("far-west", "far-east"))
    pd = tuple(replace(local, name=name, num_instances=num_pd) for name in ("west", "east"))
    pairs = [(source.name, target.name) for source in prfaas for target in pd]
    paths = tuple(ClusterPath(*pair, link) for pair in pairs if pair != (down, "west"))
    tenants = (TenantShare("bank", bound_ratio, EAST),) if bound_ratio else ()
    return replace(deployment, prfaas=prfaas, pd=pd, paths=paths, tenants=tenants)


@pytest.mark.parametrize("down", ["", "far-west"])
@pytest.mark.parametrize("bound_ratio", [0.0, 0.3])
@pytest.mark.parametrize(("num_pd", "link"), [(4, 1e8), (4, 3e8), (4, 1e9), (8, 3e8)])
def test_plan_is_within_a_hundredth_of_the_bound(num_pd: int, link: float, bound_ratio: float, down: str) -> None:
    deployment = four_datacenters(2, num_pd, link, down=down, bound_ratio=bound_ratio)
    traffic = case_study()[1]
    loads = LoadModel(deployment, traffic)
    plan, bound = best_plan(deployment, traffic), whole_bound(loads, lp_bound(loads))
    assert 0.99 * bound.system_throughput <= plan.system_throughput <= bound.system_throughput * (1 + 1e-6)


def test_tenant_with_all_requests_is_planned_as_its_region_alone() -> None:
    traffic = case_study()[1]
    both = four_datacenters(2, 4, 1e9, bound_ratio=1.0)
    alone = replace(both, prfaas=both.prfaas[1:], pd=both.pd[1:], paths=both.paths[3:], tenants=())
    bounds = [lp_bound(LoadModel(made, traffic)).system_throughput for made in (both, alone)]
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-4)
    plan = best_plan(both, traffic)
    assert plan.system_throughput == pytest.approx(best_plan(alone, traffic).system_throughput, rel=1e-4)
    assert plan.remote_shares == pytest.approx((0.0, 1.0))


def test_tenant_without_a_way_out_is_prefilled_in_its_cluster() -> None:
    traffic = case_study()[1]
    free = four_datacenters(2, 4, 1e9)
    inside = replace(free, tenants=(TenantShare("bank", 0.5, frozenset({"east"})),))
    plan = best_plan(inside, traffic)
    assert {(route.decode, route.source) for route in plan.routes if route.clusters} == {("east", None)}
    assert sum(route.share for route in plan.routes) == pytest.approx(1.0, abs=1e-3)
    assert plan.system_throughput < best_plan(free, traffic).system_throughput
