"""Role changes: gain, busy stage, duration, and the last instance of a role."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.roles import ClusterRoles, RoleChange, RoleRules, RoleWishes, Stage, step, wished_role
from prfaas.types import ClusterName, InstanceId

WEST = ClusterName("west")
RULES = RoleRules(lasting_seconds=10.0, min_gain_ratio=0.05, busy_ratio=0.8)


def _stage(prefix: str, loads: list[int], utilization: float) -> Stage:
    return Stage({InstanceId(f"{prefix}{number}"): load for number, load in enumerate(loads)}, utilization)


def _cluster(best: float, *, prefill: float = 1.0, decode: float = 1.0) -> ClusterRoles:
    return ClusterRoles(WEST, _stage("p", [3, 1], prefill), _stage("d", [9, 7, 7], decode), best)


@pytest.mark.parametrize(
    ("cluster", "gain", "wished"),
    [
        (_cluster(3), 0.1, "prefill"),
        (_cluster(1), 0.1, "decode"),
        (_cluster(2), 0.1, None),
        (_cluster(2.9), 0.1, None),  # Less than a whole instance is missing.
        (_cluster(3), 0.04, None),
        (_cluster(3, prefill=0.79), 0.1, None),
        (_cluster(1, decode=0.79), 0.1, None),
        (_cluster(3, decode=0.0), 0.1, "prefill"),
        (replace(_cluster(3), decode=_stage("d", [1], 1.0)), 0.1, None),  # Only one instance decodes.
        (replace(_cluster(0), prefill=_stage("p", [1], 1.0)), 0.1, None),
    ],
)
def test_wished_role(cluster: ClusterRoles, gain: float, wished: str | None) -> None:
    assert wished_role(cluster, gain_ratio=gain, rules=RULES) == wished


def test_lasting_wish_becomes_a_change_of_the_least_busy_instance() -> None:
    wishes, change = step(RoleWishes(), [_cluster(1)], gain_ratio=0.1, rules=RULES, now=100.0)
    assert change is None
    wishes, change = step(wishes, [_cluster(1)], gain_ratio=0.1, rules=RULES, now=109.9)
    assert change is None
    wishes, change = step(wishes, [_cluster(1)], gain_ratio=0.1, rules=RULES, now=110.0)
    assert change == RoleChange(InstanceId("p1"), "decode")
    assert wishes == RoleWishes(), "the next one begins anew"


@pytest.mark.parametrize("between", [_cluster(2), _cluster(3), _cluster(1, decode=0.5)])
def test_interrupted_wish_starts_anew(between: ClusterRoles) -> None:
    wishes, _ = step(RoleWishes(), [_cluster(1)], gain_ratio=0.1, rules=RULES, now=0.0)
    wishes, _ = step(wishes, [between], gain_ratio=0.1, rules=RULES, now=5.0)
    wishes, change = step(wishes, [_cluster(1)], gain_ratio=0.1, rules=RULES, now=11.0)
    assert change is None
    assert step(wishes, [_cluster(1)], gain_ratio=0.1, rules=RULES, now=21.0)[1] is not None


loads = st.lists(st.integers(0, 9), max_size=4)
ratios = st.floats(0, 1)


@given(loads, loads, ratios, ratios, st.floats(0, 8), st.floats(0, 1))
def test_no_role_loses_its_last_instance_and_the_split_gets_closer_to_the_best(
    prefill: list[int], decode: list[int], busy_prefill: float, busy_decode: float, best: float, gain: float
) -> None:
    cluster = ClusterRoles(WEST, _stage("p", prefill, busy_prefill), _stage("d", decode, busy_decode), best)
    _, change = step(RoleWishes(), [cluster], gain_ratio=gain, rules=replace(RULES, lasting_seconds=0.0), now=0.0)
    if change is None:
        return
    giving, taking = (decode, prefill) if change.role == "prefill" else (prefill, decode)
    assert len(giving) > 1
    assert change.instance not in (cluster.prefill if change.role == "prefill" else cluster.decode).requests
    before, after = len(prefill), len(prefill) + (1 if change.role == "prefill" else -1)
    assert abs(best - after) <= abs(best - before)
    assert taking is not giving
