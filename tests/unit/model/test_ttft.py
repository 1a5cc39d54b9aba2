from __future__ import annotations

import math

import numpy as np
import pytest

from prfaas.model.capacity import ttft
from prfaas.model.cost.lengths import Empirical
from prfaas.model.planning.planner import best_plan, homogeneous, naive
from tests.support.planner_inputs import case_study, profile, small_deployment, workload


def test_table_6_s_times_to_first_token() -> None:
    deployment, traffic = case_study()
    printed = [(2.22, 3.51), (4.44, 9.73), (1.74, 3.51)]
    for made, (mean, p90) in zip((deployment, homogeneous(deployment), naive(deployment)), printed, strict=True):
        found = ttft.queue_free(best_plan(made, traffic, method="paper"), made, traffic)
        assert (found.mean_seconds, found.quantile_seconds) == pytest.approx((mean, p90), rel=0.01)


def test_queues_only_add_and_grow_with_the_load() -> None:
    deployment, traffic = case_study()
    plan = best_plan(deployment, traffic, method="exact")
    free = ttft.queue_free(plan, deployment, traffic)
    queued = [
        ttft.with_queueing(plan, deployment, traffic, arrivals_per_second=load * plan.system_throughput)
        for load in (0.0, 0.5, 0.8, 0.95)
    ]
    assert queued[0].mean_seconds == pytest.approx(free.mean_seconds, rel=1e-3)
    assert queued[0].quantile_seconds == pytest.approx(free.quantile_seconds, rel=1e-2)
    means = [found.mean_seconds for found in queued]
    tails = [found.quantile_seconds for found in queued]
    assert means == sorted(means)
    assert tails == sorted(tails)


def test_ttft_above_the_throughput_is_unbounded() -> None:
    deployment, traffic = case_study()
    plan = best_plan(deployment, traffic, method="exact")
    found = ttft.with_queueing(plan, deployment, traffic, arrivals_per_second=1.05 * plan.system_throughput)
    assert found.mean_seconds == math.inf


def test_waiting_agrees_with_a_simulated_queue() -> None:
    """Poisson arrivals at a pool of four, first come first served, against Allen and Cunneen's approximation."""
    lengths = Empirical(np.random.default_rng(3).lognormal(8.5, 0.8, 4000))
    deployment = small_deployment(profile(0.2, 1e-4), profile(0.2, 1e-4), num_prfaas=4, num_pd=40)
    deployment = naive(deployment)
    traffic = workload(lengths)
    plan = best_plan(deployment, traffic, method="exact")
    arrivals = 0.8 * plan.system_throughput
    found = ttft.with_queueing(plan, deployment, traffic, arrivals_per_second=arrivals)
    assert found.mean_seconds == pytest.approx(simulated_mean(lengths, 4, arrivals), rel=0.05)


def simulated_mean(lengths: Empirical, num_servers: int, arrivals: float) -> float:
    generator = np.random.default_rng(11)
    drawn = generator.choice(lengths.requests[0], 200_000)
    free_at, now, total = [0.0] * num_servers, 0.0, 0.0
    for tokens, gap in zip(drawn, generator.exponential(1 / arrivals, len(drawn)), strict=True):
        now += gap
        server = free_at.index(min(free_at))
        free_at[server] = max(free_at[server], now) + 0.2 + 1e-4 * tokens
        total += free_at[server] - now
    return total / len(drawn)
