import math

import pytest

from benchmarks.solver.paper_form import paper_plan
from prfaas.model.capacity import ttft
from prfaas.model.planning.planner import best_plan, homogeneous, naive
from tests.support.planner_inputs import case_study


def test_table_6_s_times_to_first_token() -> None:
    deployment, traffic = case_study()
    printed = [(2.22, 3.51), (4.44, 9.73), (1.74, 3.51)]
    for made, (mean, p90) in zip((deployment, homogeneous(deployment), naive(deployment)), printed, strict=True):
        found = ttft.estimate_ttft(paper_plan(made, traffic), made, traffic)
        assert (found.mean_seconds, found.quantile_seconds) == pytest.approx((mean, p90), rel=0.01)


def test_queues_only_add_and_grow_with_the_load() -> None:
    deployment, traffic = case_study()
    plan = best_plan(deployment, traffic)
    queued = [
        ttft.estimate_ttft(plan, deployment, traffic, arrivals_per_second=load * plan.system_throughput)
        for load in (0.0, 0.5, 0.8, 0.95)
    ]
    means = [found.mean_seconds for found in queued]
    tails = [found.quantile_seconds for found in queued]
    assert means == sorted(means)
    assert tails == sorted(tails)


def test_ttft_above_the_throughput_is_unbounded() -> None:
    deployment, traffic = case_study()
    plan = best_plan(deployment, traffic)
    found = ttft.estimate_ttft(plan, deployment, traffic, arrivals_per_second=1.05 * plan.system_throughput)
    assert found.mean_seconds == math.inf
