"""Plans of instances that prefill and decode at once, against brute force over what such an instance can do."""

import itertools
from dataclasses import replace

import pytest

from prfaas.model.capacity.loads import LoadModel
from prfaas.model.cost.colocation import Frontier
from prfaas.model.cost.lengths import Lengths
from prfaas.model.cost.profile import DecodeProfile
from prfaas.model.deployment import Deployment
from prfaas.model.planning.many_pd import ManyPd
from prfaas.model.planning.planner import best_plan
from tests.support.planner_inputs import profile, small_deployment, workload

# Half of the device decodes at full speed and prefills at half of it: a + b/2 ≤ 1.
HALVES = Frontier.through((0.5, 1.0))
# A large batch leaves less to prefill.
BY_BATCH = Frontier(((0.5, ((1.0, 0.85), (50.0, 0.75), (200.0, 0.7))), (0.8, ((1.0, 0.3), (200.0, 0.25)))))
PROMPT = Lengths([1000, 1001])


def overlapping(overlap: float) -> Frontier:
    """Return a + b ≤ 1 + overlap with a, b ≤ 1."""
    return Frontier.through((overlap, 1.0), (1.0, overlap))


def shared(frontier: Frontier, *, base_seconds: float, num_instances: int = 1) -> Deployment:
    """Return shared instances alone. A step of 200 requests takes 25 ms, which is the objective."""
    decode = DecodeProfile(base_seconds, (0.025 - base_seconds) / 200)
    made = small_deployment(profile(0.0, 1e-4), replace(profile(0.0, 1e-4), decode=decode))
    pd = replace(made.pd[0], num_instances=num_instances, shared_instances=num_instances, frontier=frontier)
    return replace(made, prfaas=(), pd=(pd,))


def brute_force(frontier: Frontier, *, base_seconds: float, output_tokens: float) -> float:
    """Return the most requests per second over all batches and all times that a device spends at each corner."""
    most, parts = 0.0, 200
    for batch in range(1, 201):
        step = base_seconds + (0.025 - base_seconds) * batch / 200
        decoded = batch / 0.025 / output_tokens
        for (a, b), (c, d) in itertools.pairwise(frontier.at(batch)):
            for part in range(parts + 1):
                prefill, decode = (x + (y - x) * part / parts for x, y in ((a, c), (b, d)))
                if decode * 0.025 >= step - 1e-12:
                    most = max(most, min(decoded, prefill / 0.10005))
    return most


@pytest.mark.parametrize("base_seconds", [0.0, 0.005, 0.015])
@pytest.mark.parametrize("output_tokens", [10, 100, 700, 2000])
@pytest.mark.parametrize("frontier", [HALVES, overlapping(0.3), Frontier.through((0.3, 0.95), (0.7, 0.5))])
def test_a_plan_finds_the_best_mix_of_both_phases(
    frontier: Frontier, base_seconds: float, output_tokens: float
) -> None:
    deployment = shared(frontier, base_seconds=base_seconds)
    planned = best_plan(deployment, workload(PROMPT, output_tokens=output_tokens)).system_throughput
    most = brute_force(frontier, base_seconds=base_seconds, output_tokens=output_tokens)
    assert planned == pytest.approx(most, rel=0.01)


@pytest.mark.parametrize("base_seconds", [0.005, 0.015])
@pytest.mark.parametrize("output_tokens", [100, 700, 2000])
def test_a_plan_with_speeds_by_batch_is_at_most_five_percent_above_the_best_batch(
    base_seconds: float, output_tokens: int
) -> None:
    """The plan may alternate between batches, which makes its line concave."""
    deployment = shared(BY_BATCH, base_seconds=base_seconds)
    planned = best_plan(deployment, workload(PROMPT, output_tokens=output_tokens)).system_throughput
    most = brute_force(BY_BATCH, base_seconds=base_seconds, output_tokens=output_tokens)
    assert 0.99 * most <= planned <= 1.05 * most


def test_overlap_adds_to_one_role_what_the_other_has_at_most() -> None:
    for overlap in (0.0, 0.2, 0.4, 1.0):
        plan = best_plan(shared(overlapping(overlap), base_seconds=0.0), workload(PROMPT, output_tokens=700))
        assert plan.num_prefill + plan.num_decode == pytest.approx(1 + overlap)
        few = best_plan(shared(overlapping(overlap), base_seconds=0.0), workload(PROMPT, output_tokens=10))
        assert few.num_prefill == pytest.approx(1.0, abs=0.02)


def test_one_shared_cluster_and_its_halves_sustain_the_same() -> None:
    traffic, whole = workload(PROMPT, output_tokens=700), shared(HALVES, base_seconds=0.005, num_instances=4)
    half = replace(whole.pd[0], num_instances=2, shared_instances=2)
    halves = replace(whole, pd=(half, replace(half, name="second")))
    planned = ManyPd(LoadModel(halves, traffic)).plan().system_throughput
    assert planned == pytest.approx(best_plan(whole, traffic).system_throughput, rel=1e-3)
