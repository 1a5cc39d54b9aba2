"""The route of one request: every way it can go, and why."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.route import EXPLANATIONS, Decision, Reason, route
from prfaas.scheduler.snapshot import InstanceState, RequestFacts, Snapshot
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole

T = 1000


def _instance(
    name: str, kind: ClusterKind, role: InstanceRole, *, healthy: bool = True, load: int = 0
) -> InstanceState:
    cluster = ClusterName("east" if kind == "prfaas" else "west")
    return InstanceState(InstanceId(name), cluster, kind, role, AgentName(f"agent-{name}"), healthy, load)


EAST = _instance("e", "prfaas", "prefill")
WEST = _instance("w", "pd", "both")
SNAPSHOT = Snapshot(T, (EAST, WEST))
LONG = RequestFacts(T + 1)


@pytest.mark.parametrize(
    ("snapshot", "request_", "route_", "reason"),
    [
        (SNAPSHOT, LONG, "remote", "long"),
        (SNAPSHOT, RequestFacts(T), "local", "short"),
        (SNAPSHOT, RequestFacts(9 * T, cached_tokens={WEST.agent: 8 * T}), "local", "short"),
        (SNAPSHOT, RequestFacts(9 * T, cached_tokens={EAST.agent: 8 * T}), "remote", "long"),
        (SNAPSHOT, RequestFacts(9 * T, transferable=False), "local", "not_transferable"),
        (Snapshot(T, (WEST,)), LONG, "local", "no_prefill_instance"),
        (Snapshot(T, (replace(EAST, healthy=False), WEST)), LONG, "local", "no_prefill_instance"),
        (replace(SNAPSHOT, links_down=frozenset([(EAST.cluster, WEST.cluster)])), LONG, "local", "link_down"),
        (Snapshot(T, (EAST,)), LONG, "refused", "no_decode_instance"),
        (Snapshot(T, (EAST, replace(WEST, healthy=False))), LONG, "refused", "no_decode_instance"),
        (Snapshot(T, ()), LONG, "refused", "no_decode_instance"),
    ],
)
def test_each_case_goes_where_its_reason_says(
    snapshot: Snapshot, request_: RequestFacts, route_: str, reason: str
) -> None:
    decision = route(snapshot, request_)
    assert (decision.route, decision.reason) == (route_, reason)


def test_the_node_with_the_prefix_is_chosen_unless_it_is_overloaded() -> None:
    other = _instance("w2", "pd", "both")
    facts = RequestFacts(T, cached_tokens={other.agent: 500})
    assert route(Snapshot(T, (WEST, other)), facts).decode == other.instance
    busy = replace(other, num_requests=50)
    assert route(Snapshot(T, (WEST, busy)), facts).decode == WEST.instance


instances = st.builds(
    _instance,
    st.sampled_from("abcdef"),
    st.sampled_from(["prfaas", "pd"]),
    st.sampled_from(["prefill", "decode", "both"]),
    healthy=st.booleans(),
    load=st.integers(0, 20),
)
snapshots = st.builds(
    Snapshot,
    st.integers(0, 3 * T),
    st.lists(instances, max_size=6, unique_by=lambda its: its.instance).map(tuple),
    st.sampled_from([frozenset(), frozenset([(ClusterName("east"), ClusterName("west"))])]),
)
facts = st.builds(RequestFacts, st.integers(1, 5 * T), transferable=st.booleans())


@given(snapshots, facts)
def test_a_decision_is_total_explained_and_never_names_a_dead_instance(
    snapshot: Snapshot, request: RequestFacts
) -> None:
    decision = route(snapshot, request)
    states = {its.instance: its for its in snapshot.instances}
    assert decision.reason in EXPLANATIONS
    assert (decision.decode is None) == (decision.route == "refused")
    assert (decision.prefill is not None) == (decision.route == "remote")
    if decision.decode is not None:
        assert states[decision.decode].decodes
    if decision.prefill is not None:
        assert states[decision.prefill].prefills_for_others


@given(snapshots, facts, st.integers(0, 3 * T))
def test_a_higher_threshold_never_sends_more_away(snapshot: Snapshot, request: RequestFacts, more: int) -> None:
    raised = replace(snapshot, threshold_tokens=snapshot.threshold_tokens + more)
    if route(snapshot, request).route != "remote":
        assert route(raised, request).route != "remote"


@given(snapshots, facts)
def test_a_recorded_snapshot_gives_the_same_decision(snapshot: Snapshot, request: RequestFacts) -> None:
    recorded = Snapshot.from_dict(json.loads(json.dumps(snapshot.to_dict())))
    assert recorded == snapshot
    assert route(recorded, request) == route(snapshot, request)


def test_every_reason_is_explained() -> None:
    assert set(EXPLANATIONS) == set(Reason.__args__)  # type: ignore[attr-defined]
    assert Decision("local", "short").prefill is None
