"""Replay of recent requests in the twin before a plan's better split or smaller fleet counts."""

from dataclasses import replace
from functools import partial
from statistics import fmean

import pytest

from prfaas.manager.planning.demand import needed_instances
from prfaas.manager.planning.replay import Replay, drawn_requests, replayed_seconds, sampled_requests
from prfaas.manager.state.traffic import MAX_REQUESTS, RequestSample, Traffic
from prfaas.manager.state.world import ThresholdPlan
from prfaas.model.planning.planner import best_plan
from tests.support.planner_inputs import case_study

PLAN = ThresholdPlan(1, 0.0, 1000, 1.0, 0.0, "decode", {}, {}, 2.0, {}, {})


@pytest.mark.parametrize(
    ("replayed", "gain"),
    [(None, 0.0), ((2.0, 1.5), 1.0), ((None, 1.5), 1.0), ((1.5, 1.5), 0.0), ((1.0, 2.0), 0.0), ((1.0, None), 0.0)],
)
def test_split_counts_as_better_only_if_the_twin_answers_faster_too(
    replayed: tuple[float | None, float | None] | None, gain: float
) -> None:
    assert replace(PLAN, replayed_ttft_seconds=replayed).split_gain_ratio == gain


def test_smaller_fleet_is_withheld_while_the_last_hour_would_miss_the_objective_with_it() -> None:
    listed, traffic = case_study()
    listed = replace(listed, objectives=replace(listed.objectives, ttft_seconds=12.0))
    before, fewer = needed_instances(listed, traffic, 2.4), needed_instances(listed, traffic, 0.8)
    assert sum(fewer["h20"].values()) < sum(before["h20"].values())
    for arrivals, needed, earlier, expected in (
        (0.8, fewer, before, fewer),
        (2.4, fewer, before, before),
        (2.4, before, fewer, before),  # A larger fleet is never withheld.
    ):
        replay = Replay(partial(drawn_requests, traffic, arrivals), traffic, listed, needed, earlier)
        assert replay.is_due == (needed is fewer)
        assert replay.run().needed_instances == expected


def test_second_region_is_replayed_with_its_instances() -> None:
    listed, traffic = case_study()
    (pd,), (prfaas,) = listed.pd, listed.prfaas
    both = replace(listed, prfaas=(prfaas, replace(prfaas, name="far")), pd=(pd, replace(pd, name="north")))
    requests = drawn_requests(traffic, 2.4)[:500]
    alone, both_regions = (
        fmean(replayed_seconds(variant, best_plan(variant, traffic), traffic, requests)) for variant in (listed, both)
    )
    assert both_regions < alone


def test_requests_that_other_managers_saw_are_replaced_by_a_faster_pace() -> None:
    _, traffic = case_study()
    seen = Traffic(window_seconds=100.0)
    seen.note_reports(0, 0.0)
    for second in range(100):
        seen.note(RequestSample(second, 100, 20, 8))
        seen.note_reports(4, second)
    assert seen.seen_ratio(100.0) == pytest.approx(0.25, rel=0.02)
    assert seen.seen_ratio(0.0) == 1.0
    requests = sampled_requests(seen.within(50.0, 100.0), traffic, seen_ratio=0.25)
    assert [request.arrival for request in requests[:3]] == [0.0, 0.25, 0.5]
    assert {(request.num_prompt_tokens, request.num_cached_tokens) for request in requests} == {(120, 20)}


def test_requests_that_a_full_store_dropped_count_as_seen() -> None:
    seen = Traffic(window_seconds=100.0)
    for tick in range(2 * MAX_REQUESTS):
        at = 100.0 * tick / (2 * MAX_REQUESTS)
        seen.note(RequestSample(at, 100, 20, 8))
        seen.note_reports(1, at)
    assert seen.seen_ratio(99.99) == pytest.approx(1.0, rel=0.03)
