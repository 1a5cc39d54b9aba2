from dataclasses import replace

import pytest

from prfaas.errors import ConfigError
from prfaas.model.capacity.decoding import DecodeCapacity, decode_capacity
from prfaas.model.deployment import Deployment, Objectives
from tests.support.planner_inputs import PAPER_LENGTHS, profile, small_deployment, workload

TRAFFIC = workload(PAPER_LENGTHS)


def deployment(*, memory: float | None = None, speed: float = 40.0) -> Deployment:
    local = replace(profile(0.4, 1e-4), kv_memory_bytes=memory)
    return replace(small_deployment(profile(0.4, 1e-4), local), objectives=Objectives(speed))


def capacity(made: Deployment) -> DecodeCapacity:
    return decode_capacity(made.pd[0], made, TRAFFIC)


def test_the_batch_is_the_largest_whose_step_meets_the_objective() -> None:
    assert (capacity(deployment()).max_batch, capacity(deployment()).limit) == (20, "slo")
    assert capacity(deployment(speed=30)).max_batch == 36
    assert capacity(deployment(speed=30)).step_seconds <= 1 / 30


def test_memory_bounds_the_batch_by_the_mean_context() -> None:
    request = deployment().model.kv_bytes(TRAFFIC.output.mean_context_tokens)
    found = capacity(deployment(memory=7.9 * request))
    assert (found.max_batch, found.limit) == (7, "memory")


def test_batch_stays_within_the_measured_range() -> None:
    made = deployment(speed=1)
    measured = replace(made.pd[0].profile, decode=replace(made.pd[0].profile.decode, max_batch=64))  # type: ignore[type-var]
    made = replace(made, pd=(replace(made.pd[0], profile=measured),))
    assert (capacity(made).max_batch, capacity(made).limit) == (64, "profile")


@pytest.mark.parametrize(("memory", "speed", "words"), [(None, 100, "below the objective"), (1e6, 40, "one request")])
def test_objective_that_one_request_misses_is_refused(memory: float | None, speed: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        capacity(deployment(memory=memory, speed=speed))
