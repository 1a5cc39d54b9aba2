"""Fetches of prefixes: conditions, source and destination."""

from dataclasses import replace

import pytest

from prfaas.scheduler.route import Decision, PrefixFetch, find_fetch, route
from prfaas.scheduler.snapshot import InstanceState, PathState, RequestFacts, Snapshot
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole

T = 1000
EAST, WEST = ClusterName("east"), ClusterName("west")


def _instance(name: str, cluster: ClusterName, kind: ClusterKind, role: InstanceRole) -> InstanceState:
    return InstanceState(InstanceId(name), cluster, kind, role, AgentName(f"node-{name}"))


PREFILL = _instance("prefill", EAST, "prfaas", "prefill")
DECODE, OTHER = _instance("decode", WEST, "pd", "both"), _instance("other", WEST, "pd", "decode")
ABUNDANT = Snapshot(
    T,
    (PREFILL, DECODE),
    paths=(PathState(EAST, WEST, T, is_abundant=True), PathState(WEST, EAST, T, is_abundant=True)),
    fetch_tokens=100,
)


def _facts(num_prompt_tokens: int, **cached: int) -> RequestFacts:
    return RequestFacts(num_prompt_tokens, cached_tokens={AgentName(f"node-{name}"): n for name, n in cached.items()})


def _fetch(source: InstanceState, destination: InstanceState, num_tokens: int) -> PrefixFetch:
    return PrefixFetch(source.agent, destination.agent, num_tokens)


def test_prefix_of_the_pd_cluster_is_fetched_to_the_prfaas_cluster_for_a_long_rest() -> None:
    decision = route(ABUNDANT, _facts(5000, decode=2500, prefill=500))
    assert decision == Decision("remote", "long", DECODE.instance, PREFILL.instance, _fetch(DECODE, PREFILL, 2500))


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        (replace(ABUNDANT, paths=()), Decision("remote", "long", DECODE.instance, PREFILL.instance)),
        (replace(ABUNDANT, fetch_tokens=0), Decision("remote", "cached_elsewhere", DECODE.instance, PREFILL.instance)),
        (
            replace(ABUNDANT, fetch_tokens=2501),
            Decision("remote", "cached_elsewhere", DECODE.instance, PREFILL.instance),
        ),
        (replace(ABUNDANT, links_down=frozenset({(EAST, WEST)})), Decision("local", "link_down", DECODE.instance)),
    ],
)
def test_scarce_paths_small_gains_and_dead_links_allow_no_fetch(snapshot: Snapshot, expected: Decision) -> None:
    assert route(snapshot, _facts(3000, prefill=2500)) == expected


def test_longest_prefix_is_fetched_and_among_equals_the_nearest() -> None:
    snapshot = replace(ABUNDANT, instances=(PREFILL, DECODE, OTHER))
    assert find_fetch(snapshot, _facts(3000, prefill=2500, other=2000), DECODE) == _fetch(PREFILL, DECODE, 2500)
    assert find_fetch(snapshot, _facts(3000, prefill=2500, other=2500), DECODE) == _fetch(OTHER, DECODE, 2500)
    assert find_fetch(snapshot, _facts(3000, decode=2500, other=2500), DECODE) is None


def test_unknown_node_is_no_source_of_a_fetch() -> None:
    facts = replace(_facts(3000), cached_tokens={AgentName("stranger"): 2500})
    assert find_fetch(ABUNDANT, facts, DECODE) is None
