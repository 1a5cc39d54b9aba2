"""Present state of a deployment for the dashboard, as one JSON document."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from prfaas import metrics
from prfaas.index.membership import Member, NodeState
from prfaas.manager.dashboard.cache_hits import CacheHits
from prfaas.manager.operations.rebalancer import Rebalancer
from prfaas.manager.planning.paths import LIMITS, Paths
from prfaas.manager.routing.outcomes import OutcomeLog, counts_by_reason
from prfaas.manager.routing.router import RequestRouter
from prfaas.manager.state.world import World
from prfaas.scheduler.congestion import cause_in_words, raised_threshold

if TYPE_CHECKING:
    from prfaas.manager.planning.planner import Planner

FIRST_FULL = {"prfaas": "PrfaaS prefill", "link": "the link", "pd-prefill": "local prefill", "pd-decode": "decode"}
MAX_REQUESTS = 50
MAX_SESSIONS = 20
MAX_PREFIXES = 12
CAPACITY_SECONDS = 3600.0  # A rate that was measured so long ago still shows, like in the charts.


@dataclass(frozen=True)
class Overview:
    """Reads the parts of a manager. `clock` is monotonic; `wall_clock` is Unix time."""

    name: str
    started_at: float  # Unix time in seconds.
    world: World
    paths: Paths
    routing: RequestRouter
    rebalancer: Rebalancer
    outcomes: OutcomeLog
    cache_hits: CacheHits
    actions: Iterable[tuple[Any, ...]]  # Operators' actions: the fields of a change.
    planner: Planner | None  # None without a deployment file.
    is_stale: Callable[[], bool]
    clock: Callable[[], float]
    wall_clock: Callable[[], float]

    def document(self) -> dict[str, Any]:
        """Return everything that the page shows of the present."""
        members = self.world.live()
        return {
            "at": self.wall_clock(),
            "manager": self._manager(),
            "nodes": [self._node(member) for member in members],
            "links": [link for member in members for link in self._links(member)],
            "paths": list(self.path_records()),
            "plan": self._plan(),
            "decisions": counts_by_reason(metrics.MANAGER_DECISIONS),
            "pool": self.world.holdings(),
            "prefixes": self.rebalancer.hot(MAX_PREFIXES),
            "sessions": self._sessions(),
            "answered": counts_by_reason(metrics.MANAGER_ANSWERED),
            "requests": list(self._requests()),
        }

    def _plan(self) -> dict[str, Any] | None:
        plan = self.world.plan
        return asdict(plan) | {"first_full": FIRST_FULL.get(plan.limit, plan.limit)} if plan else None

    def _requests(self) -> Iterator[dict[str, Any]]:
        for key, decision in islice(self.routing.decisions.latest(), MAX_REQUESTS):
            outcome = self.outcomes.get(key)
            yield {"id": key.hex(), **decision.summary(), "ended": asdict(outcome) if outcome else None}

    def _manager(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "started_at": self.started_at,
            "version": self.world.version,
            "is_settling": self.world.is_settling,
            "is_stale": self.is_stale(),
            "local_policy": self.routing.config.local_policy,
            "threshold_tokens": self.routing.threshold_tokens,
            "can_plan": self.planner is not None,
            "currency": self.planner.currency if self.planner else "",
        }

    def _node(self, member: Member) -> dict[str, Any]:
        node = member.node
        loads = {load.instance: load for load in member.figures.engines}
        plan = self.world.plan
        return {
            "name": node.name,
            "cluster": node.cluster,
            "cluster_kind": node.cluster_kind,
            "silent_seconds": self.world.silent_seconds(node.name),
            "is_silent": member.state is NodeState.SILENT,
            "is_leaving": node.name in self.world.leaving,
            "engines": [
                {
                    "instance": engine.instance,
                    "role": engine.role,
                    "next_role": plan.draining.get(engine.instance) if plan else None,
                    "model": engine.model,
                    "load": asdict(loads[engine.instance]) if engine.instance in loads else None,
                }
                for engine in node.engines
            ],
        }

    def _links(self, member: Member) -> Iterator[dict[str, Any]]:
        for link in member.figures.links:
            peer = self.world.membership.get(link.peer)
            yield {
                "node": member.node.name,
                "cluster": member.node.cluster,
                "peer_cluster": peer.node.cluster if peer else None,
                **asdict(link),
            }

    def path_records(self) -> Iterator[dict[str, Any]]:
        """Yield each path between two clusters with its own threshold."""
        for view in self.paths.views():
            measured = self.paths.planned_bytes_per_second(
                view.source, view.destination, within_seconds=CAPACITY_SECONDS
            )
            listed = self.planner.listed_rate(view.source, view.destination) if self.planner else math.inf
            # An estimate may exceed the line for a moment, and be below a rate that has just grown.
            shown = max(view.bytes_per_second, min(measured, listed)) if measured else 0.0
            yield {
                "source": view.source,
                "destination": view.destination,
                "is_down": view.is_down,
                "bytes_per_second": view.bytes_per_second,
                "capacity_bytes_per_second": shown,
                "measured_bytes_per_second": view.capacity_bytes_per_second,
                "listed_bytes_per_second": listed if math.isfinite(listed) else None,
                "multiplier": view.congestion.multiplier,
                "cause": view.congestion.cause,
                "reason": cause_in_words(view.congestion, LIMITS),
                "pressure": view.congestion.pressure,
                "pressures": view.pressures,
                "threshold_tokens": raised_threshold(self.routing.threshold_tokens, view.congestion),
            }

    def _sessions(self) -> dict[str, Any]:
        sessions = self.routing.sessions
        latest = islice(sessions.latest(self.clock()), MAX_SESSIONS)
        return {
            "total": self.routing.num_sessions(),
            "by_node": sessions.by_agent(),
            "latest": [
                {
                    "tenant": tenant,
                    "name": name,
                    "node": session.agent,
                    "num_prompt_tokens": session.num_prompt_tokens,
                    "idle_seconds": idle,
                }
                for tenant, name, session, idle in latest
            ],
        }
