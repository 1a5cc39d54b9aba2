"""Links of a plan: those of the file, and measured rates in their place."""

import math
from dataclasses import replace

import pytest

from prfaas.manager.planning.planner import PlanInputs, links_with, served_tenants
from prfaas.model.capacity.bound import lp_bound, whole_bound
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.deployment import ClusterPath, TenantShare
from prfaas.model.planning.planner import best_plan
from tests.support.planner_inputs import case_study


def test_unmeasured_path_is_limited_by_egress_if_the_file_lists_none() -> None:
    file, traffic = case_study()
    (first,), (pd,) = file.prfaas, file.pd
    file = replace(file, prfaas=(first, replace(first, name="second")), paths=())
    assert links_with([], file) == []
    found = links_with([(first.name, pd.name, 1e9)], file)
    assert found == [ClusterPath(first.name, pd.name, 1e9), ClusterPath("second", pd.name, math.inf)]
    measured = replace(file, paths=tuple(found))
    assert measured.egress(measured.prfaas[1]) == first.egress_bytes_per_second
    plan = best_plan(measured, traffic)
    alone = best_plan(replace(file, prfaas=file.prfaas[:1], paths=(ClusterPath(first.name, pd.name, 1e9),)), traffic)
    assert plan.system_throughput > alone.system_throughput


def test_unlimited_link_does_not_limit_the_plan() -> None:
    file, traffic = case_study()
    unlimited = replace(file, paths=(ClusterPath(file.prfaas[0].name, file.pd[0].name, math.inf),))
    plans = [best_plan(deployment, traffic) for deployment in (unlimited, replace(file, paths=()))]
    assert plans[0].system_throughput == pytest.approx(plans[1].system_throughput)


def test_measured_rates_replace_those_of_the_file() -> None:
    file, _ = case_study()
    source, target = file.prfaas[0].name, file.pd[0].name
    listed = replace(file, paths=(ClusterPath(source, target, 5e9), ClusterPath(source, "other", 2e9)))
    assert links_with([(source, target, 1e9)], listed) == [
        ClusterPath(source, target, 1e9),
        ClusterPath(source, "other", 2e9),
    ]


@pytest.mark.parametrize("num_listed", [0, 4])
def test_plan_of_two_by_two_clusters_without_a_down_link_is_within_a_percent_of_the_bound(num_listed: int) -> None:
    file, traffic = case_study()
    (prfaas,), (pd,) = file.prfaas, file.pd
    sources, targets = ("west-gpu", "east-gpu"), ("west", "east")
    deployment = replace(
        file,
        prfaas=tuple(replace(prfaas, name=name, num_instances=2) for name in sources),
        pd=tuple(replace(pd, name=name, num_instances=4) for name in targets),
        paths=tuple(ClusterPath(source, target, 1e9) for source in sources for target in targets)[:num_listed],
    )
    down = frozenset({("west-gpu", "west")})
    present = replace(deployment, paths=tuple(links_with([], deployment, down=down)))
    assert {(path.source, path.target) for path in present.paths} == {
        (source, target) for source in sources for target in targets
    } - down
    plan, loads = best_plan(present, traffic), LoadModel(present, traffic)
    bound = whole_bound(loads, lp_bound(loads))
    assert plan.system_throughput == pytest.approx(bound.system_throughput, rel=0.01)
    assert plan.system_throughput <= bound.system_throughput * (1 + 1e-9)


def test_a_tenant_without_a_live_cluster_limits_no_plan() -> None:
    file, traffic = case_study()
    gone, here = TenantShare("gone", 0.1, frozenset({"dead"})), TenantShare("here", 0.2, frozenset({file.pd[0].name}))
    assert served_tenants((gone, here), file.pd) == (here,)
    bound = replace(file, tenants=served_tenants((gone,), file.pd))
    assert best_plan(bound, traffic) == best_plan(file, traffic)


def test_the_cause_of_a_plan_names_the_instances_prices_and_paths_that_changed() -> None:
    pd, pair = ("pd", (("decode", 2),)), ("east", "pd")
    before = PlanInputs((pd, ("east", (("prefill", 1),))), ((*pair, 25e6),), (0.05,))
    assert before.change_since(replace(before)) == "recent requests and link rates"
    for changed, words in (
        (replace(before, roles=(pd,)), ("from east: 1 prefill", "to none")),
        (replace(before, egress_prices=(0.02,)), ("0.05", "0.02")),
        (replace(before, rates=((*pair, 12.5e6),)), ("east → pd", "200 Mbit/s", "100 Mbit/s")),
        (replace(before, rates=()), ("east → pd", "200 Mbit/s", "unknown")),
        (replace(before, down=frozenset({pair})), ("east → pd", "down")),
    ):
        assert all(word in changed.change_since(before) for word in words), changed.change_since(before)
