"""Thresholds and splits: the paper's optimum found, on either side of every limit."""

from dataclasses import replace

import pytest

from benchmarks.solver.paper_form import paper_plan
from prfaas.model.cost.lengths import log_normal, mixture
from prfaas.model.planning.planner import best_plan, equal_cost, homogeneous, naive
from tests.support.planner_inputs import PAPER_LENGTHS, case_study, with_links_as_wide, workload


def test_solver_finds_the_splits_of_the_paper() -> None:
    deployment, traffic = case_study()
    plans = [best_plan(made, traffic) for made in (deployment, homogeneous(deployment), naive(deployment))]
    assert [(plan.num_prefill, plan.num_decode) for plan in plans] == [(3, 5), (9, 3), (0, 8)]
    assert plans[0].threshold_tokens == pytest.approx(19_400, rel=0.02)
    assert [plan.threshold_tokens for plan in plans[1:]] == [None, None]


def test_narrow_path_raises_the_threshold_and_is_the_limit() -> None:
    deployment, traffic = case_study()
    wide = best_plan(deployment, traffic)
    narrow = best_plan(with_links_as_wide(deployment, 0.5e9), traffic)
    assert wide.limit == "prfaas"
    assert narrow.limit == "link"
    assert narrow.threshold_tokens > wide.threshold_tokens  # type: ignore[operator]
    assert narrow.system_throughput < wide.system_throughput


def test_two_prfaas_clusters_with_their_own_paths_add_up() -> None:
    deployment, traffic = case_study()
    (cluster,) = deployment.prfaas
    halves = tuple(replace(cluster, name=name, num_instances=2) for name in ("east", "west"))
    together = best_plan(replace(deployment, prfaas=halves), traffic)
    assert together.system_throughput == pytest.approx(best_plan(deployment, traffic).system_throughput)
    assert together.remote_shares == pytest.approx((0.5, 0.5))


def test_a_fixed_split_is_kept() -> None:
    deployment, traffic = case_study()
    fixed = replace(deployment, pd=(replace(deployment.pd[0], num_prefill=5),))
    plan = best_plan(fixed, traffic)
    assert plan.num_prefill == 5
    assert plan.system_throughput < best_plan(deployment, traffic).system_throughput


def test_sharing_without_overlap_allows_fractional_splits() -> None:
    deployment, traffic = case_study()
    shared = replace(deployment, pd=(replace(deployment.pd[0], shared_instances=1),))
    plan = best_plan(shared, traffic)
    assert plan.num_prefill + plan.num_decode == pytest.approx(8)
    assert plan.pd_decode_throughput == pytest.approx(plan.system_throughput, rel=1e-6)
    assert plan.system_throughput > best_plan(deployment, traffic).system_throughput


def test_equal_cost_is_fifteen_percent_below_the_case_study() -> None:
    deployment, traffic = case_study()
    alternative = equal_cost(deployment)
    assert alternative is not None
    assert alternative.price_per_hour == deployment.price_per_hour
    gain = paper_plan(deployment, traffic).system_throughput / paper_plan(alternative, traffic).system_throughput
    assert gain == pytest.approx(1.15, abs=0.01)


def test_prefix_hits_cost_less_than_whole_prompts() -> None:
    deployment, traffic = case_study()
    hits = mixture([(0.5, PAPER_LENGTHS), (0.5, log_normal(9.2, 1.0, 128, 131_072, cached_ratio=1.0))])
    assert best_plan(deployment, workload(hits)).system_throughput > best_plan(deployment, traffic).system_throughput
