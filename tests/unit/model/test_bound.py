"""The linear program: above every policy, equal to the threshold where that is optimal, right about what is worth what."""

from dataclasses import replace

import pytest

from prfaas.model.capacity.bound import Bound, lp_bound, whole_bound
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import ClusterPath, Deployment
from prfaas.model.planning.planner import best_plan
from tests.support.planner_inputs import case_study, with_links_as_wide


def bounds(deployment: Deployment, traffic: Workload) -> tuple[LoadModel, Bound, Bound]:
    loads = LoadModel(deployment, traffic)
    fractional = lp_bound(loads)
    return loads, fractional, whole_bound(loads, fractional)


def test_the_case_study_s_exact_plan_is_within_a_thousandth_of_its_bound() -> None:
    deployment, traffic = case_study()
    _, fractional, whole = bounds(deployment, traffic)
    plan = best_plan(deployment, traffic)
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
        gained = lp_bound(LoadModel(grown, traffic)).system_throughput - fractional.system_throughput
        assert worth[name] == pytest.approx(gained, rel=0.1)
        # The program is concave.
        assert gained <= worth[name] * (1 + 1e-3)


def test_a_price_of_bandwidth_is_what_one_more_gbit_adds() -> None:
    deployment, traffic = case_study()
    narrow = with_links_as_wide(deployment, 0.5e9)
    loads, fractional, _ = bounds(narrow, traffic)
    wider = lp_bound(LoadModel(with_links_as_wide(deployment, 0.5e9 + 125e6), traffic))
    gained = wider.system_throughput - fractional.system_throughput
    assert fractional.duals(loads)["gbps:h200"] == pytest.approx(gained, rel=0.15)


def test_clusters_without_a_path_exchange_nothing() -> None:
    deployment, traffic = case_study()
    (remote,), (pd,) = deployment.prfaas, deployment.pd
    two = replace(deployment, prfaas=(remote, replace(remote, name="apart")))
    cut = replace(two, paths=(ClusterPath(remote.name, pd.name, 12.5e9),))
    whole, less = (lp_bound(LoadModel(made, traffic)).system_throughput for made in (two, cut))
    assert less < 0.9 * whole
