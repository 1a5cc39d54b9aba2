"""Role changes within a PD cluster: another split would sustain more, and the stage that gains an instance is busy.

PrfaaS §3.4.3, the long timescale. A wish must last before it becomes a change, and starts again after an interruption.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prfaas.types import ClusterName, InstanceId

Role = Literal["prefill", "decode"]


@dataclass(frozen=True)
class RoleRules:
    """Limits of role changes. From the utilisation `busy_ratio` on a stage deserves another instance."""

    lasting_seconds: float
    min_gain_ratio: float
    busy_ratio: float = 0.8


@dataclass(frozen=True)
class Stage:
    """Instances of one role in one cluster with their running requests, and their utilisation from 0 to 1."""

    requests: Mapping[InstanceId, int]
    utilization: float


@dataclass(frozen=True)
class ClusterRoles:
    """Present roles of one PD cluster, and the N_p with which the deployment would sustain most."""

    cluster: ClusterName
    prefill: Stage
    decode: Stage
    best_num_prefill: float


@dataclass(frozen=True)
class RoleChange:
    """Instance that is to take another role."""

    instance: InstanceId
    role: Role


@dataclass(frozen=True)
class RoleWishes:
    """Role that each cluster lacks an instance of, and since when, in seconds on a monotonic clock."""

    since: Mapping[ClusterName, tuple[Role, float]] = field(default_factory=dict)


def wished_role(roles: ClusterRoles, *, gain_ratio: float, rules: RoleRules) -> Role | None:
    """Return the role that one more instance should have, or None. Each role keeps at least one instance."""
    if gain_ratio < rules.min_gain_ratio:
        return None
    missing = roles.best_num_prefill - len(roles.prefill.requests)
    if missing >= 1 and len(roles.decode.requests) > 1 and roles.prefill.utilization >= rules.busy_ratio:
        return "prefill"
    if missing <= -1 and len(roles.prefill.requests) > 1 and roles.decode.utilization >= rules.busy_ratio:
        return "decode"
    return None


def step(
    wishes: RoleWishes, clusters: Sequence[ClusterRoles], *, gain_ratio: float, rules: RoleRules, now: float
) -> tuple[RoleWishes, RoleChange | None]:
    """Return the wishes from now on, and the one change that was wished for long enough.

    `gain_ratio` states how much more the deployment would sustain with the best splits: 0.1 for a tenth.
    """
    since: dict[ClusterName, tuple[Role, float]] = {}
    for roles in clusters:
        role = wished_role(roles, gain_ratio=gain_ratio, rules=rules)
        if role is not None:
            before = wishes.since.get(roles.cluster)
            since[roles.cluster] = before if before is not None and before[0] == role else (role, now)
    for roles in clusters:
        role, start = since.get(roles.cluster, (None, now))
        if role is not None and now - start >= rules.lasting_seconds:
            return RoleWishes(), RoleChange(_least_busy(roles, role), role)
    return RoleWishes(since), None


def _least_busy(roles: ClusterRoles, role: Role) -> InstanceId:
    giving = roles.decode.requests if role == "prefill" else roles.prefill.requests
    return min(giving, key=lambda instance: (giving[instance], instance))
