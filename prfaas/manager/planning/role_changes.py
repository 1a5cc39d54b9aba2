"""Role changes of a deployment's PD instances: who is drained, who has changed, and how busy each stage is.

The plan in force carries both (`ThresholdPlan.roles`, `.draining`), so that all managers and routers see one version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from prfaas import logs, metrics
from prfaas.index.membership import Member
from prfaas.manager.config import ManagerConfig
from prfaas.manager.state.quiescence import SETTLE_SECONDS
from prfaas.manager.state.world import ThresholdPlan, World
from prfaas.scheduler.roles import ClusterRoles, Role, RoleRules, RoleWishes, Stage, step
from prfaas.types import ClusterName, InstanceId

SMOOTHING_SECONDS = 5.0
_log = logs.get("manager.roles")


@dataclass(frozen=True)
class RoleAssignment:
    """Assigned roles by instance, and instances that get nothing new because they are about to take another."""

    assigned: Mapping[InstanceId, Role] = field(default_factory=dict)
    draining: Mapping[InstanceId, Role] = field(default_factory=dict)


class RoleChanges:
    """Steps twice a second beside the plan. Times are seconds on a clock that only goes forward."""

    def __init__(self, config: ManagerConfig, *, world: World, clock: Callable[[], float]) -> None:
        self._config = config
        self._world = world
        self._clock = clock
        self._rules = RoleRules(config.role_change_seconds, config.role_change_gain)
        self._wishes = RoleWishes()
        self._draining: Mapping[InstanceId, Role] = {}  # as of the step before, which may have been another manager's
        self._drained_since = 0.0
        self._stepped_at = clock()
        self._utilization: dict[tuple[ClusterName, Role], float] = {}

    def step(self, plan: ThresholdPlan, max_batches: Mapping[str, int]) -> RoleAssignment | None:
        """The roles that a new plan should have, or None when they stay. `max_batches`: of a decode instance, by cluster."""
        now = self._clock()
        clusters = self._clusters(plan, max_batches, now)
        if plan.draining != self._draining:
            self._draining, self._drained_since = plan.draining, now
        if plan.draining:
            return self._drained(plan, now)
        gain = plan.best_requests_per_second / plan.requests_per_second - 1 if plan.requests_per_second else math.inf
        self._wishes, change = step(self._wishes, clusters, gain_ratio=gain, rules=self._rules, now=now)
        if change is None:
            return None
        applies = self._config.role_changes == "apply"
        event = "role.draining" if applies else "role.recommended"
        _log.info(event, instance=change.instance, role=change.role, gain_ratio=round(gain, 3))
        metrics.ROLE_CHANGES.labels(role=change.role, outcome="begun" if applies else "recommended").inc()
        if not applies:
            return None
        return RoleAssignment(plan.roles, {change.instance: change.role})

    def _drained(self, plan: ThresholdPlan, now: float) -> RoleAssignment | None:
        """The roles once what drains is idle, has had its time, or is gone."""
        loads = {
            load.instance: load.num_running + load.num_waiting
            for member in self._world.live()
            for load in member.figures.engines
        }
        here = {engine.instance for member in self._world.live() for engine in member.node.engines}
        waited = now - self._drained_since
        busy = [name for name in plan.draining if name in here and loads.get(name, 1)]  # 1: nobody says what it runs
        if (busy and waited < self._config.role_drain_seconds) or waited < SETTLE_SECONDS:
            return None
        for instance, role in plan.draining.items():
            left = loads.get(instance)  # None: nobody says
            _log.info("role.changed", instance=instance, role=role, seconds=round(waited, 1), num_requests_left=left)
            metrics.ROLE_CHANGES.labels(role=role, outcome="done").inc()
        return RoleAssignment({**plan.roles, **plan.draining})

    def _clusters(self, plan: ThresholdPlan, max_batches: Mapping[str, int], now: float) -> list[ClusterRoles]:
        share = 1 - math.exp(-(now - self._stepped_at) / SMOOTHING_SECONDS)
        self._stepped_at = now
        gathered: dict[ClusterName, dict[Role, dict[InstanceId, int]]] = {}
        for member in self._world.live():
            if member.node.cluster_kind == "pd":
                _gather(gathered.setdefault(member.node.cluster, {"prefill": {}, "decode": {}}), member)
        self._utilization = {key: its for key, its in self._utilization.items() if key[0] in gathered}
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
        """Its utilisation is the mean part of what each instance can run at once, smoothed over some seconds."""
        present = sum(min(1.0, count / capacity) for count in requests.values()) / max(1, len(requests))
        key = (cluster, role)
        before = self._utilization.get(key, present)
        smoothed = self._utilization[key] = before + share * (present - before)
        waiting = sum(max(0, count - capacity) for count in requests.values())
        metrics.STAGE_UTILIZATION.labels(cluster=cluster, stage=role).set(smoothed)
        metrics.STAGE_WAITING.labels(cluster=cluster, stage=role).set(waiting)
        return Stage(requests, smoothed)


def _gather(stages: dict[Role, dict[InstanceId, int]], member: Member) -> None:
    loads = {load.instance: load.num_running + load.num_waiting for load in member.figures.engines}
    for engine in member.node.engines:
        if engine.role != "both":
            stages[engine.role][engine.instance] = loads.get(engine.instance, 0)
