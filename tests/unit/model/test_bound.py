"""The linear program: above every policy, equal to the threshold where that is optimal, right about what is worth what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas.model.capacity.bound import Bound, lp_bound, whole_bound
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import ClusterPath, Deployment, PdCluster, PrfaasCluster
from prfaas.model.planning.planner import best_plan
from tests.support.planner_inputs import case_study, profile, with_links_as_wide


def bounds(deployment: Deployment, traffic: Workload) -> tuple[LoadModel, Bound, Bound]:
    loads = LoadModel(deployment, traffic, "exact")
    fractional = lp_bound(loads)
    return loads, fractional, whole_bound(loads, fractional)


def test_the_case_study_s_exact_plan_is_within_a_thousandth_of_its_bound() -> None:
    deployment, traffic = case_study()
    _, fractional, whole = bounds(deployment, traffic)
    plan = best_plan(deployment, traffic, method="exact")
    assert plan.system_throughput <= whole.system_throughput <= fractional.system_throughput
    assert 1 - plan.system_throughput / whole.system_throughput < 1e-3


def test_a_price_is_what_one_more_instance_adds() -> None:
    deployment, traffic = case_study()
    loads, fractional, _ = bounds(deployment, traffic)
    worth = fractional.duals(loads)
    (remote,), (local,) = deployment.prfaas, deployment.pd
    more_remote = replace(deployment, prfaas=(replace(remote, num_instances=5),))
    more_local = replace(deployment, pd=(replace(local, num_instances=9),))
    for name, grown in (("instance:h200", more_remote), ("instance:h20", more_local)):
        gained = lp_bound(LoadModel(grown, traffic, "exact")).system_throughput - fractional.system_throughput
        assert worth[name] == pytest.approx(gained, rel=0.1)
        # The program is concave.
        assert gained <= worth[name] * (1 + 1e-3)


def test_a_price_of_bandwidth_is_what_one_more_gbit_adds() -> None:
    deployment, traffic = case_study()
    narrow = with_links_as_wide(deployment, 0.5e9)
    loads, fractional, _ = bounds(narrow, traffic)
    wider = lp_bound(LoadModel(with_links_as_wide(deployment, 0.5e9 + 125e6), traffic, "exact"))
    gained = wider.system_throughput - fractional.system_throughput
    assert fractional.duals(loads)["gbps:h200"] == pytest.approx(gained, rel=0.15)


def test_more_bandwidth_of_a_wide_path_is_worth_nothing() -> None:
    loads, fractional, _ = bounds(*case_study())
    assert fractional.duals(loads)["gbps:h200"] == 0


def two_by_two(*, link: float) -> Deployment:
    remote, local = profile(0.4, 4e-5, 1e-10), profile(0.46, 1.3e-4, 2.8e-10)
    return Deployment(
        "prfaas-pd",
        case_study()[0].model,
        (PrfaasCluster("east", remote, 4), PrfaasCluster("west", remote, 2)),
        (PdCluster("a", local, 8), PdCluster("b", local, 5)),
        tuple(ClusterPath(source, target, link) for source in ("east", "west") for target in ("a", "b")),
    )


def test_several_clusters_stay_below_their_bound_and_close_to_it() -> None:
    traffic = case_study()[1]
    for link, close in ((5e8, 0.93), (1e9, 0.96)):
        deployment = two_by_two(link=link)
        plan = best_plan(deployment, traffic, method="exact")
        loads = LoadModel(deployment, traffic, "exact")
        planned = lp_bound(loads, box=[(split.num_prefill, split.num_prefill) for split in plan.splits])
        assert plan.system_throughput <= planned.system_throughput
        assert plan.system_throughput > close * lp_bound(loads).system_throughput
    assert sum(plan.remote_shares) == pytest.approx(1)
    assert sum(plan.local_shares) == pytest.approx(1)


def test_several_clusters_of_a_kind_do_what_one_of_their_size_does() -> None:
    deployment, traffic = two_by_two(link=1e12), case_study()[1]
    (remote, *_), (local, *_) = deployment.prfaas, deployment.pd
    joined = replace(
        deployment, prfaas=(replace(remote, num_instances=6),), pd=(replace(local, num_instances=13),), paths=()
    )
    several, single = (best_plan(made, traffic, method="exact") for made in (deployment, joined))
    assert several.system_throughput <= single.system_throughput * (1 + 1e-9)
    assert several.system_throughput > 0.96 * single.system_throughput


def test_clusters_without_a_path_exchange_nothing() -> None:
    deployment = two_by_two(link=1e12)
    cut = replace(deployment, paths=deployment.paths[:1])
    traffic = case_study()[1]
    assert (
        lp_bound(LoadModel(cut, traffic, "exact")).system_throughput
        < lp_bound(LoadModel(deployment, traffic, "exact")).system_throughput
    )
