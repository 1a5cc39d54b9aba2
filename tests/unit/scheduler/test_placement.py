"""Placement by KV space: full engines are left out, nearly full ones take less."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from prfaas.scheduler.placement import KV_AMPLE_RATIO, KV_FULL_RATIO, REQUEST_TOKENS, choose_instance
from prfaas.scheduler.route import route
from prfaas.scheduler.snapshot import InstanceState, RequestFacts, Snapshot
from tests.unit.scheduler.deployment import T, instance

PROMPT = RequestFacts(T)
FIRST, SECOND = instance("a", "pd", "both"), instance("b", "pd", "both")

AWAY = instance("c", "pd", "both", cluster="north")
PREFERRING = replace(PROMPT, home=FIRST.cluster)


@pytest.mark.parametrize(
    ("home", "away", "facts", "overflows"),
    [
        (FIRST, AWAY, PREFERRING, False),
        (replace(FIRST, num_requests=3), AWAY, PREFERRING, False),
        (replace(FIRST, num_requests=5), AWAY, PREFERRING, True),
        (replace(FIRST, num_requests=5), AWAY, replace(PREFERRING, clusters=frozenset({FIRST.cluster})), False),
        (replace(FIRST, kv_usage_ratio=1.0), AWAY, PREFERRING, True),
        (FIRST, replace(AWAY, kv_usage_ratio=1.0), PREFERRING, False),
        (FIRST, AWAY, replace(PREFERRING, num_prompt_tokens=40 * T, cached_tokens={AWAY.agent: 12 * T}), False),
        (FIRST, AWAY, replace(PREFERRING, num_prompt_tokens=40 * T, cached_tokens={AWAY.agent: 30 * T}), True),
        (replace(FIRST, healthy=False), AWAY, PREFERRING, True),
    ],
)
def test_requests_leave_their_home_cluster_for_much_kv_or_much_shorter_queues(
    home: InstanceState, away: InstanceState, facts: RequestFacts, overflows: bool
) -> None:
    decode = route(Snapshot(100 * T, (home, away)), facts).decode
    assert decode == (away if overflows else home).instance


ratios = st.floats(0, 1)
fleets = st.lists(st.tuples(st.integers(0, 100), ratios), min_size=1, max_size=5).map(
    lambda given: [
        replace(instance(f"i{number}", "pd", "both", load=load), kv_usage_ratio=ratio)
        for number, (load, ratio) in enumerate(given)
    ]
)
requests = st.builds(
    RequestFacts,
    st.just(100 * T),
    cached_tokens=st.dictionaries(st.sampled_from([f"agent-i{number}" for number in range(5)]), st.integers(0, 99 * T)),
    seed=st.integers(0, 500),
)


def _chosen(fleet: list[InstanceState], request: RequestFacts) -> InstanceState:
    chosen = choose_instance(fleet, request)
    assert chosen is not None
    return chosen


def _with_kv(fleet: list[InstanceState], chosen: InstanceState, ratio: float) -> list[InstanceState]:
    return [
        replace(instance, kv_usage_ratio=ratio) if instance.instance == chosen.instance else instance
        for instance in fleet
    ]


@given(fleets, requests)
def test_engine_with_full_kv_is_used_only_if_all_are_full(fleet: list[InstanceState], request: RequestFacts) -> None:
    is_full = _chosen(fleet, request).kv_usage_ratio >= KV_FULL_RATIO
    assert is_full == all(instance.kv_usage_ratio >= KV_FULL_RATIO for instance in fleet)


@given(fleets, requests, ratios, st.data())
def test_less_kv_space_never_attracts_a_request(
    fleet: list[InstanceState], request: RequestFacts, ratio: float, data: st.DataObject
) -> None:
    roomy = [chosen for chosen in fleet if chosen.kv_usage_ratio < KV_FULL_RATIO]
    assume(len(roomy) > 1)  # Otherwise all engines are full, or would be.
    chosen = data.draw(st.sampled_from(roomy))
    fuller = _with_kv(fleet, chosen, max(ratio, chosen.kv_usage_ratio))
    assert _chosen(fleet, request) is chosen or _chosen(fuller, request).instance != chosen.instance


@given(fleets, requests, st.floats(0, KV_AMPLE_RATIO))
def test_usage_of_ample_kv_space_changes_nothing(
    fleet: list[InstanceState], request: RequestFacts, ratio: float
) -> None:
    empty = [replace(instance, kv_usage_ratio=0.0) for instance in fleet]
    used = [replace(instance, kv_usage_ratio=ratio) for instance in fleet]
    assert _chosen(used, request).instance == _chosen(empty, request).instance


@pytest.mark.parametrize(
    ("ratio", "num_requests_ahead", "taken"),
    [
        (KV_AMPLE_RATIO, 0, "a"),
        (0.90, 4, "b"),
        (0.90, 5, "a"),
        (0.97, 14, "b"),
        (0.97, 15, "a"),
        (KV_FULL_RATIO, 40, "b"),
    ],
)
def test_prefix_on_a_nearly_full_engine_must_be_worth_the_wait(
    ratio: float, num_requests_ahead: int, taken: str
) -> None:
    """The first holds what so many requests are worth; the second is empty."""
    held = {FIRST.agent: num_requests_ahead * REQUEST_TOKENS + 1}
    request = RequestFacts(50 * REQUEST_TOKENS, cached_tokens=held)
    chosen = choose_instance([replace(FIRST, kv_usage_ratio=ratio), SECOND], request)
    assert chosen is not None and chosen.instance == taken
