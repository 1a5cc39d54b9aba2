from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas.model.cost.lengths import mean_tokens
from prfaas.model.cost.workload import with_context
from prfaas.model.planning.planner import best_plan
from prfaas.model.planning.sensitivity import _changes, sensitivity
from tests.support.planner_inputs import case_study, with_links_as_wide


def changes(egress: float = 12.5e9) -> dict[str, tuple[float, float]]:
    deployment, traffic = case_study()
    deployment = with_links_as_wide(deployment, egress)
    plan = best_plan(deployment, traffic)
    found = sensitivity(deployment, traffic)
    assert found.base.system_throughput == plan.system_throughput
    return {
        name: (low.system_throughput / plan.system_throughput - 1, high.system_throughput / plan.system_throughput - 1)
        for name, (low, high) in found.plans.items()
        if low is not None and high is not None
    }


def test_slower_hardware_and_longer_traffic_cost_throughput() -> None:
    found = changes()
    for name in ("remote prefill time", "local prefill time", "decode step", "input lengths"):
        lower, higher = found[name]
        assert lower > 0.01 > -0.01 > higher, name


def test_egress_matters_only_where_it_limits() -> None:
    assert changes()["egress and links"] == pytest.approx((0, 0), abs=1e-12)
    narrow = changes(egress=0.5e9)
    assert narrow["egress and links"][0] < -0.01 < 0.01 < narrow["egress and links"][1]
    assert narrow["KV bytes"][0] > 0.01 > -0.01 > narrow["KV bytes"][1]


def test_longer_prompts_and_answers_raise_the_decoding_context() -> None:
    deployment, traffic = case_study()
    traffic = replace(traffic, output=with_context(traffic.output, traffic.lengths))
    for name in ("input lengths", "output tokens"):
        change = _changes(deployment)[name]
        _, longer_traffic = change(deployment, traffic, 1.2)
        expected = with_context(longer_traffic.output, longer_traffic.lengths).mean_context_tokens
        assert longer_traffic.output.mean_context_tokens == pytest.approx(expected), name
        assert longer_traffic.output.mean_context_tokens > traffic.output.mean_context_tokens
        stretched = 1.2 if name == "input lengths" else 1.0
        assert mean_tokens(longer_traffic.lengths) == pytest.approx(stretched * mean_tokens(traffic.lengths))


def test_an_input_that_allows_no_plan_does_not_end_the_study() -> None:
    deployment, traffic = case_study()
    # One request alone meets this objective, but not with steps a fifth slower.
    tight = replace(deployment, objectives=replace(deployment.objectives, decode_tokens_per_second=60.0))
    assert best_plan(tight, traffic).system_throughput > 0
    lower, higher = sensitivity(tight, traffic).plans["decode step"]
    assert higher is None
    assert lower is not None
