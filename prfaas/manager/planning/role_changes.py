"""Role changes that the plan makes: the drained instance, its new role, and the utilization of each stage.

The plan in force carries both (`ThresholdPlan.roles`, `.draining`), so that all managers and routers see one version.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from prfaas import logs, metrics
from prfaas.index.membership import Member
from prfaas.manager.config import ManagerConfig
from prfaas.manager.state.quiescence import RoleChangeProgress, RoleChangeState, requests_by_instance
from prfaas.manager.state.world import ThresholdPlan, World
from prfaas.scheduler.roles import ClusterRoles, Role, RoleRules, RoleWishes, Stage, step
from prfaas.types import ClusterName, InstanceId

SMOOTHING_SECONDS = 5.0
MIN_GAIN_RATIO = 0.05  # Another split must sustain so much more.
ROLE_DRAIN_SECONDS = 120.0  # Then an instance takes its new role with the requests that it still has.
_log = logs.get("manager.roles")


@dataclass(frozen=True)
class RoleAssignment:
    """Assigned roles by instance, and instances that get no new work before they take another role."""

    assigned: Mapping[InstanceId, Role] = field(default_factory=dict)
    draining: Mapping[InstanceId, Role] = field(default_factory=dict)


class RoleChanges:
    """Steps twice a second after the planner. `clock` is monotonic."""

    def __init__(self, config: ManagerConfig, *, world: World, clock: Callable[[], float]) -> None:
        self._config = config
        self._world = world
        self._clock = clock
        self._rules = RoleRules(config.role_change_seconds, MIN_GAIN_RATIO)
        self._wishes = RoleWishes()
        # Another manager may have started the change that is in progress.
        self._draining: Mapping[InstanceId, Role] = {}
        self._change: RoleChangeProgress | None = None
        self._stepped_at = clock()
        self._utilization: dict[tuple[ClusterName, Role], float] = {}

    def step(self, plan: ThresholdPlan, max_batches: Mapping[str, int]) -> RoleAssignment | None:
        """Return the roles that a new plan should have, or None if they stay. `max_batches` is keyed by PD cluster."""
        now = self._clock()
        clusters = self._clusters(plan, max_batches, now)
        if plan.draining != self._draining:
            self._follow(plan.draining, now)
        if self._change is not None:
            return self._drained(plan, self._change, now)
        gain = plan.split_gain_ratio
        self._wishes, wish = step(self._wishes, clusters, gain_ratio=gain, rules=self._rules, now=now)
        if wish is None:
            return None
        applies = self._config.role_changes == "apply"
        event = "role.drain_started" if applies else "role.change_recommended"
        _log.info(event, instance=wish.instance, role=wish.role, gain_ratio=round(gain, 3))
        metrics.ROLE_CHANGES.labels(role=wish.role, outcome="begun" if applies else "recommended").inc()
        return RoleAssignment(plan.roles, {wish.instance: wish.role}) if applies else None

    def _follow(self, draining: Mapping[InstanceId, Role], now: float) -> None:
        """Track the role change of a new plan."""
        if self._change is not None:
            self._change.withdraw()
        self._draining = draining
        self._change = RoleChangeProgress(timeout_seconds=ROLE_DRAIN_SECONDS, now=now) if draining else None

    def _drained(self, plan: ThresholdPlan, change: RoleChangeProgress, now: float) -> RoleAssignment | None:
        """Return the roles once the draining instances are idle, unregistered, or out of time."""
        live = self._world.live()
        loads = {name: count for member in live for name, count in requests_by_instance(member).items()}
        present = {engine.instance for member in live for engine in member.node.engines}
        if not change.is_final:
            # An instance whose load is unknown counts as busy.
            busy = any(name in present and loads.get(name, 1) for name in plan.draining)
            if change.step(is_busy=busy, now=now) is not RoleChangeState.APPLIED:
                return None
            seconds = round(change.seconds(now), 1)
            for instance, role in plan.draining.items():
                left = loads.get(instance)
                _log.info("role.changed", instance=instance, role=role, seconds=seconds, num_requests_left=left)
                metrics.ROLE_CHANGES.labels(role=role, outcome="done").inc()
        return RoleAssignment({**plan.roles, **plan.draining})

    def _clusters(self, plan: ThresholdPlan, max_batches: Mapping[str, int], now: float) -> list[ClusterRoles]:
        share = 1 - math.exp(-(now - self._stepped_at) / SMOOTHING_SECONDS)
        self._stepped_at = now
        gathered: dict[ClusterName, dict[Role, dict[InstanceId, int]]] = {}
        for member in self._world.live():
            if member.node.cluster_kind == "pd":
                _gather(gathered.setdefault(member.node.cluster, {"prefill": {}, "decode": {}}), member)
        self._utilization = {key: value for key, value in self._utilization.items() if key[0] in gathered}
        for gauge in (metrics.STAGE_UTILIZATION, metrics.STAGE_WAITING):
            gauge.clear()
        clusters = []
        for name, stages in gathered.items():
            prefill = self._stage(name, "prefill", stages["prefill"], share, capacity=1)
            decode = self._stage(name, "decode", stages["decode"], share, capacity=max_batches.get(name, 1))
            if name in plan.best_splits:
                clusters.append(ClusterRoles(name, prefill, decode, plan.best_splits[name][0]))
        return clusters

    def _stage(
        self, cluster: ClusterName, role: Role, requests: Mapping[InstanceId, int], share: float, *, capacity: int
    ) -> Stage:
        """Return a stage with its utilization: the mean used share of each instance's capacity, smoothed over seconds."""
        present = sum(min(1.0, count / capacity) for count in requests.values()) / max(1, len(requests))
        key = (cluster, role)
        before = self._utilization.get(key, present)
        smoothed = self._utilization[key] = before + share * (present - before)
        waiting = sum(max(0, count - capacity) for count in requests.values())
        metrics.STAGE_UTILIZATION.labels(cluster=cluster, stage=role).set(smoothed)
        metrics.STAGE_WAITING.labels(cluster=cluster, stage=role).set(waiting)
        return Stage(requests, smoothed)


def _gather(stages: dict[Role, dict[InstanceId, int]], member: Member) -> None:
    loads = requests_by_instance(member)
    for engine in member.node.engines:
        if engine.role != "both":
            stages[engine.role][engine.instance] = loads.get(engine.instance, 0)
