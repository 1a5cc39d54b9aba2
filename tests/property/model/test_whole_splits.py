"""Plans of several clusters against brute force, and below the bound over all whole splits."""

import pytest

from prfaas.model.capacity.bound import lp_bound, whole_bound
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.planning.planner import best_plan
from tests.support.random_deployments import brute_force, random_case


def check(seed: int) -> None:
    deployment, traffic = random_case(seed)
    plan = best_plan(deployment, traffic)
    most = brute_force(deployment, traffic)
    loads = LoadModel(deployment, traffic)
    bound = whole_bound(loads, lp_bound(loads)).system_throughput
    # Routes by length may exceed the best single threshold, but no policy exceeds the bound.
    highest = bound if plan.routes else most * (1 + 1e-3)
    assert most * (1 - 1e-3) <= plan.system_throughput <= highest * (1 + 1e-6), seed
    assert bound >= most * (1 - 1e-6), seed


@pytest.mark.parametrize("start", range(0, 50, 10))
def test_plans_equal_brute_force(start: int) -> None:
    for seed in range(start, start + 10):
        check(seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(50, 1000, 50))
def test_a_thousand_plans_equal_brute_force(start: int) -> None:
    for seed in range(start, start + 50):
        check(seed)
