"""Route of one request: every outcome and its reason."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.placement import KV_FULL_RATIO, LOAD_SLACK, REQUEST_TOKENS
from prfaas.scheduler.route import EXPLANATIONS, Decision, Reason, route
from prfaas.scheduler.snapshot import InstanceState, PathState, RequestFacts, Snapshot
from prfaas.types import AgentName, OwnPolicy
from tests.unit.scheduler.deployment import (
    EAST,
    EAST_CLUSTER,
    PD_P,
    TABLE,
    WEST,
    WEST_CLUSTER,
    T,
    facts,
    instance,
    prefix_decider,
    snapshots,
)
from tests.unit.scheduler.endpoint_picker.conformance import DATA

SNAPSHOT = Snapshot(T, (EAST, WEST))
PATH = PathState(EAST_CLUSTER, WEST_CLUSTER, T)
LONG = RequestFacts(T + 1)


def _over(**path: Any) -> Snapshot:
    return replace(SNAPSHOT, paths=(replace(PATH, **path),))


@pytest.mark.parametrize(
    ("snapshot", "request_", "route_", "reason"),
    [
        (SNAPSHOT, RequestFacts(9 * T, counted=False), "local", "short"),
        (replace(SNAPSHOT, threshold_tokens=0), RequestFacts(1), "local", "short"),
        (SNAPSHOT, RequestFacts(9 * T, obstacle="media"), "local", "not_transferable"),
        (Snapshot(T, (replace(EAST, healthy=False), WEST)), LONG, "local", "no_prefill_instance"),
        (SNAPSHOT, replace(LONG, excluded=frozenset([EAST.instance])), "local", "no_prefill_instance"),
        (Snapshot(T, (EAST,)), LONG, "refused", "no_decode_instance"),
        (Snapshot(T, (EAST, replace(WEST, healthy=False))), LONG, "refused", "no_decode_instance"),
        (Snapshot(T, ()), LONG, "refused", "no_decode_instance"),
        # The pair's own threshold.
        (_over(threshold_tokens=T // 2), RequestFacts(T // 2 + 1), "remote", "long"),
        (_over(threshold_tokens=T // 2), RequestFacts(T // 2), "local", "short"),
    ],
)
def test_case_beyond_the_table_of_all_policies_has_its_route_and_reason(
    snapshot: Snapshot, request_: RequestFacts, route_: str, reason: str
) -> None:
    decision = route(snapshot, request_)
    assert (decision.route, decision.reason) == (route_, reason)


WITHIN = Snapshot(T, (EAST, WEST, PD_P))
MIDDLE = RequestFacts(T // 2)
LATER = RequestFacts(T // 2, cached_tokens={WEST.agent: T // 2 - 128}, turn=2, max_output_tokens=128)


def _picked(limit: int) -> dict[str, Any]:
    return {"local_policy": "endpoint_picker", "endpoint_picker": prefix_decider(limit)}


@pytest.mark.parametrize(
    ("fields", "request_", "route_", "reason"),
    [
        ({"local_policy": "pd"}, replace(MIDDLE, counted=False), "local", "short"),
        ({"local_policy": "pd", "instances": (EAST, WEST)}, MIDDLE, "local", "no_pd_prefill_instance"),
        ({"local_policy": "ppd", "ppd_table": TABLE}, replace(LATER, turn=1), "remote", "ppd_first_turn"),
        ({"local_policy": "pd"}, MIDDLE, "remote", "pd"),
        ({"instances": (WEST, PD_P)}, LONG, "local", "no_prefill_instance"),
        ({"instances": (WEST, PD_P)}, MIDDLE, "local", "short"),
        (_picked(0), MIDDLE, "local", "pd_disabled"),
        (_picked(T // 2), replace(MIDDLE, caches_known=False), "local", "no_cache_information"),
        (_picked(0), replace(MIDDLE, caches_known=False), "local", "pd_disabled"),
        (_picked(1) | {"instances": (EAST, WEST)}, MIDDLE, "local", "no_pd_prefill_instance"),
    ],
)
def test_local_requests_follow_the_policy_of_the_pd_cluster(
    fields: dict[str, Any], request_: RequestFacts, route_: str, reason: str
) -> None:
    decision = route(replace(WITHIN, **fields), request_)
    assert (decision.route, decision.reason) == (route_, reason)
    if reason in ("pd", "suffix_uncached", "ppd_first_turn", "ppd_table_pd", "static_pd"):
        assert decision.prefill == PD_P.instance


def test_node_with_the_prefix_is_chosen_unless_overloaded() -> None:
    second = instance("w2", "pd", "both")
    request = RequestFacts(3 * REQUEST_TOKENS, cached_tokens={second.agent: 2 * REQUEST_TOKENS})
    for load, chosen in ((1, second), (3, WEST)):  # Two requests cost as much as the cached prefix saves.
        busy = replace(second, num_requests=load)
        assert route(Snapshot(T, (WEST, busy)), request).decode == chosen.instance


@pytest.mark.parametrize("fields", [{}, _picked(1)], ids=["placement", "endpoint picker"])
def test_equal_instances_share_requests_by_their_seeds(fields: dict[str, Any]) -> None:
    equal = Snapshot(T, tuple(instance(f"w{number}", "pd", "both") for number in range(4)), **fields)
    taken = Counter(route(equal, RequestFacts(1, seed=seed)).decode for seed in range(1, 401))
    assert len(taken) == 4 and max(taken.values()) < 150
    assert {route(equal, RequestFacts(1)).decode for _ in range(9)} == {equal.instances[0].instance}


def test_decode_profile_of_an_endpoint_picker_chooses_the_instance() -> None:
    second = instance("w2", "pd", "both")
    holder = RequestFacts(T, cached_tokens={WEST.agent: T - 1})
    waiting = Snapshot(T, (replace(WEST, num_waiting=3), second), **_picked(1))
    assert route(waiting, holder).decode == second.instance  # The queue scorer decides, not the prefix.
    by_prefix = Snapshot(
        T,
        (replace(second, role="decode"), replace(WEST, role="decode", num_waiting=3), PD_P),
        local_policy="endpoint_picker",
        endpoint_picker=(DATA / "llmd-minimal.yaml").read_text(),
    )
    assert route(by_prefix, holder) == Decision("local", "suffix_cached", WEST.instance)
    assert route(by_prefix, RequestFacts(8)).reason == "suffix_uncached"
    assert route(by_prefix, RequestFacts(7)).reason == "suffix_cached"


def test_session_keeps_its_node_among_equals() -> None:
    second = instance("w2", "pd", "both", load=1)
    request = RequestFacts(T, session_agent=second.agent)
    assert route(Snapshot(T, (WEST, second)), RequestFacts(T)).decode == WEST.instance
    assert route(Snapshot(T, (WEST, second)), request).decode == second.instance
    elsewhere = replace(request, cached_tokens={WEST.agent: T - 1, second.agent: 0})
    assert route(Snapshot(T, (WEST, second)), elsewhere).decode == WEST.instance, "it is known where the prefix is"


@given(
    st.sampled_from(["ppd", "static"]),
    st.lists(
        st.tuples(st.integers(0, LOAD_SLACK), st.floats(0, KV_FULL_RATIO, exclude_max=True)), min_size=1, max_size=4
    ),
    st.dictionaries(st.sampled_from([f"agent-d{number}" for number in range(4)]), st.integers(0, 4 * T)),
    st.sampled_from([0, 2, 9]),
    st.integers(0, 500),
    st.data(),
)
def test_ppd_keeps_later_turns_on_the_session_node_whatever_its_load(
    policy: OwnPolicy,
    figures: list[tuple[int, float]],
    cached: dict[AgentName, int],
    turn: int,
    seed: int,
    data: st.DataObject,
) -> None:
    nodes = [
        replace(instance(f"d{number}", "pd", "decode", load=load), kv_usage_ratio=ratio)
        for number, (load, ratio) in enumerate(figures)
    ]
    own = data.draw(st.sampled_from(nodes))
    request = RequestFacts(5 * T, cached_tokens=cached, session_agent=own.agent, turn=turn, seed=seed)
    snapshot = Snapshot(9 * T, (*nodes, PD_P), local_policy=policy, ppd_table=TABLE)
    decision = route(snapshot, request)
    assert decision.decode == own.instance
    assert not decision.reason.startswith("session_node")
    assert (decision.reason == "ppd_first_turn") == (cached.get(own.agent, 0) == 0)


OWN, OTHER = instance("d0", "pd", "decode"), instance("d1", "pd", "decode")


@pytest.mark.parametrize("policy", ["ppd", "static"])
@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (replace(OWN, kv_usage_ratio=KV_FULL_RATIO), "session_node_full"),
        (replace(OWN, num_requests=LOAD_SLACK + 1), "session_node_slow"),
        (replace(OWN, healthy=False), "session_node_gone"),
        (None, "session_node_gone"),
    ],
)
def test_session_leaves_a_full_slow_or_missing_node(policy: OwnPolicy, own: InstanceState | None, reason: str) -> None:
    nodes = (OTHER, PD_P) if own is None else (own, OTHER, PD_P)
    snapshot = Snapshot(9 * T, nodes, local_policy=policy, ppd_table=TABLE, local_turns_ratio=1.0)
    request = RequestFacts(T, cached_tokens={OWN.agent: T - 9, OTHER.agent: 16}, session_agent=OWN.agent, turn=2)
    assert route(snapshot, request) == Decision("remote", reason, OTHER.instance, PD_P.instance)  # type: ignore[arg-type]
    first = replace(request, turn=1, session_agent=None)
    assert route(snapshot, first).reason == "ppd_first_turn"
    excluded = replace(request, excluded=frozenset([OWN.instance]))
    assert route(snapshot, excluded).reason == "session_node_gone"


def test_only_node_keeps_its_sessions_however_full() -> None:
    full = replace(OWN, kv_usage_ratio=1.0, num_requests=9 * LOAD_SLACK)
    snapshot = Snapshot(9 * T, (full, PD_P), local_policy="static", local_turns_ratio=1.0)
    request = RequestFacts(T, cached_tokens={OWN.agent: T - 9}, session_agent=OWN.agent, turn=2)
    assert route(snapshot, request) == Decision("local", "static_local", OWN.instance)


def test_second_prfaas_cluster_takes_requests_that_the_first_path_refuses() -> None:
    north = instance("n", "prfaas", "prefill", cluster="north", load=3)
    congested = replace(PATH, threshold_tokens=9 * T)
    snapshot = Snapshot(T, (EAST, north, WEST), paths=(congested,))
    assert route(snapshot, LONG) == Decision("remote", "long", WEST.instance, north.instance)
    down = replace(snapshot, paths=(), links_down=frozenset([(EAST_CLUSTER, WEST_CLUSTER)]))
    assert route(down, LONG).prefill == north.instance


@given(snapshots, facts)
def test_every_decision_is_explained_and_names_no_dead_or_excluded_instance(
    snapshot: Snapshot, request: RequestFacts
) -> None:
    decision = route(snapshot, request)
    states = {state.instance: state for state in snapshot.instances}
    assert decision.reason in EXPLANATIONS
    assert (decision.decode is None) == (decision.route == "refused")
    assert (decision.prefill is not None) == (decision.route == "remote")
    assert not {decision.decode, decision.prefill} & request.excluded
    if decision.decode is not None:
        assert states[decision.decode].decodes
    if decision.prefill is not None:
        chosen = states[decision.prefill]
        assert chosen.prefills_for_others or chosen.prefills_within(WEST_CLUSTER)


loads = st.lists(st.integers(0, 3 * LOAD_SLACK), min_size=1, max_size=3)


@given(loads, loads, loads, st.data())
def test_full_holder_of_the_prompt_is_left_out_beside_another_instance(
    easts: list[int], wests: list[int], within: list[int], data: st.DataObject
) -> None:
    instances = (
        *(instance(f"e{number}", "prfaas", "prefill", load=load) for number, load in enumerate(easts)),
        *(instance(f"w{number}", "pd", "both", load=load) for number, load in enumerate(wests)),
        *(instance(f"p{number}", "pd", "prefill", load=load) for number, load in enumerate(within)),
    )
    cached = {state.agent: data.draw(st.integers(0, T), state.instance) for state in instances}
    total = data.draw(st.integers(T + 1, 3 * T), "total")
    decision = route(Snapshot(T, instances, local_policy="pd"), RequestFacts(total, cached_tokens=cached))
    load_of = {state.instance: state.num_requests for state in instances}
    assert decision.decode is not None and decision.prefill is not None
    assert load_of[decision.decode] <= min(wests) + LOAD_SLACK
    prefilling = easts if decision.reason == "long" else within
    assert load_of[decision.prefill] <= min(prefilling) + LOAD_SLACK


def _is_offloaded(snapshot: Snapshot, request: RequestFacts) -> bool:
    return route(snapshot, request).reason in ("long", "cached_elsewhere")


@given(snapshots, facts, st.integers(0, 3 * T))
def test_higher_threshold_never_offloads_more(snapshot: Snapshot, request: RequestFacts, more: int) -> None:
    raised = replace(
        snapshot,
        threshold_tokens=snapshot.threshold_tokens + more,
        paths=tuple(replace(path, threshold_tokens=path.threshold_tokens + more) for path in snapshot.paths),
    )
    assert _is_offloaded(snapshot, request) or not _is_offloaded(raised, request)


@given(snapshots, facts, st.floats(0, 1))
def test_worse_path_never_offloads_more(snapshot: Snapshot, request: RequestFacts, share: float) -> None:
    slower = tuple(
        replace(path, cost=path.cost and replace(path.cost, bytes_per_second=path.cost.bytes_per_second * share))
        for path in snapshot.paths
    )
    for worse in (
        replace(snapshot, paths=slower),
        replace(snapshot, links_down=frozenset([(EAST_CLUSTER, WEST_CLUSTER)])),
        replace(snapshot, paths=tuple(replace(path, is_abundant=False) for path in snapshot.paths)),
    ):
        assert _is_offloaded(snapshot, request) or not _is_offloaded(worse, request)


@given(snapshots, facts)
def test_recorded_snapshot_and_request_give_the_same_decision(snapshot: Snapshot, request: RequestFacts) -> None:
    recorded = msgspec.convert(json.loads(json.dumps(snapshot.to_dict())), Snapshot)
    asked = msgspec.convert(json.loads(json.dumps(request.to_dict())), RequestFacts)
    assert (recorded, asked) == (snapshot, request)
    assert route(recorded, asked) == route(snapshot, request)


def test_every_reason_is_explained() -> None:
    words = {word for literal in get_args(Reason) for word in get_args(literal)}
    assert set(EXPLANATIONS) == words
