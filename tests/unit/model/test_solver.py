"""Thresholds and splits: the paper's optimum found, on either side of every limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas.model.capacity.loads import LoadModel, Method
from prfaas.model.cost.lengths import Mixture
from prfaas.model.cost.workload import LaterTurns
from prfaas.model.planning.planner import best_plan, equal_cost, homogeneous, naive
from prfaas.model.planning.single_pd import SinglePd
from tests.support.planner_inputs import PAPER_LENGTHS, case_study, with_links_as_wide, workload


@pytest.mark.parametrize("method", ["paper", "exact"])
def test_solver_finds_the_splits_of_the_paper(method: Method) -> None:
    deployment, traffic = case_study()
    plans = [
        best_plan(made, traffic, method=method) for made in (deployment, homogeneous(deployment), naive(deployment))
    ]
    assert [(plan.num_prefill, plan.num_decode) for plan in plans] == [(3, 5), (9, 3), (0, 8)]
    assert plans[0].threshold_tokens == pytest.approx(19_400, rel=0.005 if method == "paper" else 0.02)
    assert [plan.threshold_tokens for plan in plans[1:]] == [None, None]


def test_threshold_in_the_paper_form_is_the_best_of_all() -> None:
    deployment, traffic = case_study()
    solver = SinglePd(LoadModel(deployment, traffic, "paper"))
    plan = solver.plan()
    best = max(solver.sustained(t, 3) for t in range(15_000, 25_000))
    assert plan.system_throughput >= best * (1 - 1e-12)


def test_narrow_path_raises_the_threshold_and_is_the_limit() -> None:
    deployment, traffic = case_study()
    wide = best_plan(deployment, traffic, method="exact")
    narrow = best_plan(with_links_as_wide(deployment, 0.5e9), traffic, method="exact")
    assert wide.limit == "prfaas"
    assert narrow.limit == "link"
    assert narrow.threshold_tokens > wide.threshold_tokens  # type: ignore[operator]
    assert narrow.system_throughput < wide.system_throughput


def test_two_prfaas_clusters_with_their_own_paths_add_up() -> None:
    deployment, traffic = case_study()
    (cluster,) = deployment.prfaas
    halves = tuple(replace(cluster, name=name, num_instances=2) for name in ("east", "west"))
    together = best_plan(replace(deployment, prfaas=halves), traffic, method="exact")
    assert together.system_throughput == pytest.approx(best_plan(deployment, traffic, method="exact").system_throughput)
    assert together.remote_shares == pytest.approx((0.5, 0.5))


def test_a_fixed_split_is_kept() -> None:
    deployment, traffic = case_study()
    fixed = replace(deployment, pd=(replace(deployment.pd[0], num_prefill=5),))
    plan = best_plan(fixed, traffic, method="exact")
    assert plan.num_prefill == 5
    assert plan.system_throughput < best_plan(deployment, traffic, method="exact").system_throughput


def test_sharing_without_overlap_allows_fractional_splits() -> None:
    deployment, traffic = case_study()
    shared = replace(deployment, pd=(replace(deployment.pd[0], shared_instances=1),))
    plan = best_plan(shared, traffic, method="exact")
    assert plan.num_prefill + plan.num_decode == pytest.approx(8)
    assert plan.pd_decode_throughput == pytest.approx(plan.system_throughput, rel=1e-6)
    assert plan.system_throughput > best_plan(deployment, traffic, method="exact").system_throughput


def test_overlap_adds_roles() -> None:
    deployment, traffic = case_study()
    gains = []
    for overlap in (0.0, 0.2, 0.4):
        shared = replace(deployment, pd=(replace(deployment.pd[0], shared_instances=8, overlap=overlap),))
        plan = best_plan(shared, traffic, method="exact")
        assert plan.num_prefill + plan.num_decode == pytest.approx(8 * (1 + overlap), rel=1e-6)
        gains.append(plan.system_throughput)
    assert gains == sorted(gains)


def test_local_turns_take_decode_capacity() -> None:
    deployment, traffic = case_study()
    turns = LaterTurns(0.4, PAPER_LENGTHS, local_ratio=0.0)
    same = best_plan(deployment, replace(traffic, later=turns), method="exact")
    plain = best_plan(deployment, traffic, method="exact")
    assert same.system_throughput == pytest.approx(plain.system_throughput)
    appended = best_plan(deployment, replace(traffic, later=replace(turns, local_ratio=0.5)), method="exact")
    assert appended.offload_ratio + appended.local_ratio == pytest.approx(0.8)
    assert appended.pd_decode_throughput / appended.num_decode < plain.pd_decode_throughput / plain.num_decode


def test_equal_cost_is_fifteen_percent_below_the_case_study() -> None:
    deployment, traffic = case_study()
    alternative = equal_cost(deployment)
    assert alternative is not None
    assert alternative.price_per_hour == deployment.price_per_hour
    gain = best_plan(deployment, traffic, method="paper").system_throughput
    gain /= best_plan(alternative, traffic, method="paper").system_throughput
    assert gain == pytest.approx(1.15, abs=0.01)


def test_prefix_hits_cost_less_than_whole_prompts() -> None:
    deployment, traffic = case_study()
    hits = Mixture(((0.5, PAPER_LENGTHS), (0.5, replace(PAPER_LENGTHS, mu=PAPER_LENGTHS.mu - 0.7, cached_ratio=1.0))))
    assert (
        best_plan(deployment, workload(hits), method="exact").system_throughput
        > best_plan(deployment, traffic, method="exact").system_throughput
    )


def test_equally_good_thresholds_surround_the_best() -> None:
    deployment, traffic = case_study()
    solver = SinglePd(LoadModel(deployment, traffic, "exact"))
    plan = solver.plan()
    low, high = solver.equally_good(plan, tolerance=0.01)
    assert low < plan.threshold_tokens < high  # type: ignore[operator]
    enough = 0.99 * plan.system_throughput
    assert solver.sustained(low, 3) >= enough > solver.sustained(low - 1, 3)
    assert solver.sustained(high, 3) >= enough > solver.sustained(high + 1, 3)
