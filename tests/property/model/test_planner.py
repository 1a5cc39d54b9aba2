"""Properties of plans: more resources never hurt, units do not matter, no policy beats the bound."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prfaas.model.capacity.bound import lp_bound
from prfaas.model.capacity.loads import LoadModel
from prfaas.model.cost.colocation import Frontier
from prfaas.model.cost.curve import of_new_tokens, polynomial
from prfaas.model.cost.lengths import Lengths, expectation, log_normal, mixture
from prfaas.model.cost.profile import Profile
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment
from prfaas.model.planning.planner import best_plan
from prfaas.model.planning.single_pd import SinglePd
from tests.support.planner_inputs import profile, small_deployment, workload

EPSILON = 1e-9
# Each example plans several deployments, so fewer are drawn than of cheaper properties.
PLANNED = 2 * settings().max_examples // 5

profiles = st.builds(profile, st.floats(0.01, 2), st.floats(1e-6, 1e-3), st.floats(0, 1e-8))
log_normals = st.builds(log_normal, st.floats(5, 11), st.floats(0.2, 1.5), st.just(128.0), st.just(131_072.0))
traces = st.lists(st.integers(1, 200_000), min_size=2, max_size=60, unique=True).map(Lengths)
distributions: st.SearchStrategy[Lengths] = st.one_of(
    log_normals, traces, st.builds(lambda a, b: mixture([(0.4, a), (0.6, b)]), log_normals, traces)
)


speeds = st.floats(0.01, 1.0)
frontiers = st.lists(st.tuples(speeds, speeds), max_size=5).map(lambda points: Frontier.through(*points))


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    made = small_deployment(
        draw(profiles),
        draw(profiles),
        num_prfaas=draw(st.integers(1, 6)),
        num_pd=draw(st.integers(2, 10)),
        egress=draw(st.floats(1e7, 1e11)),
    )
    (pd,) = made.pd
    shared = draw(st.sampled_from([0, 0, 1, pd.num_instances]))
    return replace(made, pd=(replace(pd, shared_instances=shared, frontier=draw(frontiers)),))


def sustained(deployment: Deployment, traffic: Workload) -> float:
    return best_plan(deployment, traffic).system_throughput


@settings(max_examples=PLANNED)
@given(deployments(), distributions, st.floats(1.0, 3.0))
def test_more_resources_never_sustain_less(deployment: Deployment, lengths: Lengths, more: float) -> None:
    traffic = workload(lengths)
    before = sustained(deployment, traffic) * (1 - EPSILON)
    (remote,), (local,) = deployment.prfaas, deployment.pd
    quicker = replace(local.profile, prefill=local.profile.prefill.times(1 / more))
    wider = replace(remote, egress_bytes_per_second=remote.egress_bytes_per_second * more)
    for better in (
        replace(deployment, prfaas=(replace(remote, num_instances=remote.num_instances + 1),)),
        replace(deployment, pd=(replace(local, num_instances=local.num_instances + 1),)),
        replace(deployment, prfaas=(wider,)),
        replace(deployment, pd=(replace(local, profile=quicker),)),
    ):
        assert sustained(better, traffic) >= before


@settings(max_examples=PLANNED)
@given(deployments(), log_normals, st.floats(0.01, 100))
def test_scaling_all_times_scales_the_throughput(deployment: Deployment, lengths: Lengths, factor: float) -> None:
    """Seconds scaled by a factor, bandwidth and the decode objective by its inverse, scale the throughput by its inverse."""
    traffic = workload(lengths)

    def slowed(slow: Profile) -> Profile:
        assert slow.decode is not None
        return replace(slow, prefill=slow.prefill.times(factor), decode=slow.decode.times(factor))

    (remote,), (local,) = deployment.prfaas, deployment.pd
    wide = remote.egress_bytes_per_second / factor
    objectives = replace(deployment.objectives, decode_tokens_per_second=40 / factor)
    faster = replace(
        deployment,
        prfaas=(replace(remote, profile=slowed(remote.profile), egress_bytes_per_second=wide),),
        pd=(replace(local, profile=slowed(local.profile)),),
        objectives=objectives,
    )
    assert sustained(faster, traffic) == pytest.approx(sustained(deployment, traffic) / factor, rel=1e-6)


@settings(max_examples=PLANNED)
@given(deployments(), distributions, st.integers(0, 200_000), st.integers(0, 10))
def test_no_threshold_or_split_beats_the_plan_and_no_plan_the_bound(
    deployment: Deployment, lengths: Lengths, threshold: int, num_prefill: int
) -> None:
    assume(num_prefill <= deployment.pd[0].num_instances)
    loads = LoadModel(deployment, workload(lengths))
    solver = SinglePd(loads)
    plan = solver.plan()
    assert solver.sustained(threshold, num_prefill) <= plan.system_throughput * (1 + EPSILON)
    assert plan.system_throughput <= lp_bound(loads).system_throughput * (1 + 1e-7)


@given(deployments(), traces, st.integers(0, 2**32 - 1), st.integers(0, 10))
@settings(max_examples=50)
def test_random_routing_never_beats_the_bound(
    deployment: Deployment, trace: Lengths, seed: int, num_prefill: int
) -> None:
    """Any policy is a part of each request's length that goes remote; this one is drawn by chance."""
    (remote,), (local,) = deployment.prfaas, deployment.pd
    assume(num_prefill <= local.num_instances)
    loads = LoadModel(deployment, workload(trace))
    new, cached = trace.requests
    share = np.random.default_rng(seed).random(len(new)) ** 3
    away = (share * remote.profile.prefill.at(new, cached)).mean() / remote.num_instances
    sent = (share * deployment.model.curve().many(new)).mean() / remote.egress_bytes_per_second
    here = ((1 - share) * local.profile.prefill.at(new, cached)).mean() / max(num_prefill, 1e-12)
    decoded = loads.decode_seconds()[0] / max(loads.roles[0].num_decode(num_prefill), 1e-12)
    reached = 1 / max(away, sent, here, decoded)
    assert reached <= lp_bound(loads).system_throughput * (1 + 1e-7)


@given(distributions, st.lists(profiles, min_size=1, max_size=4))
def test_expected_minimum_is_at_most_each_cost(lengths: Lengths, several: list[Profile]) -> None:
    costs = [each.prefill.at for each in several]
    least = lengths.expected_minimum(costs)
    assert least <= min(expectation(lengths, cost) for cost in costs) * (1 + EPSILON)
    assert least >= expectation(lengths, of_new_tokens(polynomial(0.01))) * (1 - EPSILON)
