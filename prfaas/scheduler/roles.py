"""When an instance of a PD cluster changes its role: another split sustains more, and the stage that it gives is busy.

PrfaaS §3.4.3, the long timescale. A wish that lasts becomes a change; one that ceases begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prfaas.types import ClusterName, InstanceId

Role = Literal["prefill", "decode"]


@dataclass(frozen=True)
class RoleRules:
    """`busy_ratio`: the utilisation from which a stage is worth another instance."""

    lasting_seconds: float
    min_gain_ratio: float
    busy_ratio: float = 0.8


@dataclass(frozen=True)
class Stage:
    """The instances of one role in one cluster, with the requests under way at each, and their utilisation, 0 to 1."""

    requests: Mapping[InstanceId, int]
    utilization: float


@dataclass(frozen=True)
class ClusterRoles:
    """One PD cluster as it is, and the N_p under which the deployment would sustain most."""

    cluster: ClusterName
    prefill: Stage
    decode: Stage
    best_num_prefill: float


@dataclass(frozen=True)
class RoleChange:
    """An instance that is to take another role."""

    instance: InstanceId
    role: Role


@dataclass(frozen=True)
class RoleWishes:
    """Since when each cluster has wished for one more instance of a role; seconds on a clock that only goes forward."""

    since: Mapping[ClusterName, tuple[Role, float]] = field(default_factory=dict)


def wished_role(its: ClusterRoles, *, gain_ratio: float, rules: RoleRules) -> Role | None:
    """Return the role that one more instance should have. Each role keeps an instance."""
    if gain_ratio < rules.min_gain_ratio:
        return None
    missing = its.best_num_prefill - len(its.prefill.requests)
    if missing >= 1 and len(its.decode.requests) > 1 and its.prefill.utilization >= rules.busy_ratio:
        return "prefill"
    if missing <= -1 and len(its.prefill.requests) > 1 and its.decode.utilization >= rules.busy_ratio:
        return "decode"
    return None


def step(
    wishes: RoleWishes, clusters: Sequence[ClusterRoles], *, gain_ratio: float, rules: RoleRules, now: float
) -> tuple[RoleWishes, RoleChange | None]:
    """What is wished from here on, and the one change that has been wished for long enough.

    `gain_ratio` is how much more the deployment would sustain with the best splits: 0.1 for a tenth.
    """
    since: dict[ClusterName, tuple[Role, float]] = {}
    for its in clusters:
        role = wished_role(its, gain_ratio=gain_ratio, rules=rules)
        if role is not None:
            before = wishes.since.get(its.cluster)
            since[its.cluster] = before if before is not None and before[0] == role else (role, now)
    for its in clusters:
        role, start = since.get(its.cluster, (None, now))
        if role is not None and now - start >= rules.lasting_seconds:
            return RoleWishes(), RoleChange(_least_busy(its, role), role)
    return RoleWishes(since), None


def _least_busy(its: ClusterRoles, role: Role) -> InstanceId:
    giving = its.decode.requests if role == "prefill" else its.prefill.requests
    return min(giving, key=lambda instance: (giving[instance], instance))
