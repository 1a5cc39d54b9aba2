"""Facts behind one decision, for people: the clusters, the t that decided, the cost of each route, and the phases."""

from collections.abc import Iterator
from typing import Any, Literal

from prfaas.scheduler.planned_routes import within_planned_route
from prfaas.scheduler.route import Decision
from prfaas.scheduler.snapshot import RequestFacts, Snapshot
from prfaas.types import ClusterName

Phase = Literal["decide", "queue", "prefill", "wire", "load", "rest", "leg", "handover", "engine"]
Phases = dict[Phase, float]


def clusters_of(snapshot: Snapshot, decision: Decision) -> tuple[str, str]:
    """Return the clusters that prefill and decode; empty where nobody does."""
    places = {instance.instance: instance.cluster for instance in snapshot.instances}
    destination = places.get(decision.decode, "") if decision.decode else ""
    return (places.get(decision.prefill, "") if decision.prefill else destination), destination


def threshold_of(snapshot: Snapshot, decision: Decision) -> int:
    """Return the t that decided: that of the chosen path, or of the best congested one, else the deployment's."""
    source, destination = clusters_of(snapshot, decision)
    if decision.reason == "congested":
        congested = [path.threshold_tokens for path in snapshot.paths if path.destination == destination]
        return min(congested, default=snapshot.threshold_tokens)
    if source == destination:
        return snapshot.threshold_tokens
    return snapshot.path(ClusterName(source), ClusterName(destination)).threshold_tokens


def describe(snapshot: Snapshot, facts: RequestFacts, decision: Decision) -> dict[str, Any]:
    """Return what a page or a terminal shows beside the decision itself.

    `num_uncached_tokens` are those at the decode node, which t is compared with; None without a decode node.
    """
    snapshot = within_planned_route(snapshot, facts)
    agents = {instance.instance: instance.agent for instance in snapshot.instances}
    agent = agents.get(decision.decode) if decision.decode is not None else None
    uncached = None if agent is None else facts.uncached_at(agent)
    return {
        "num_uncached_tokens": uncached,
        "threshold_tokens": threshold_of(snapshot, decision),
        "routes": list(_routes(snapshot, clusters_of(snapshot, decision)[1], uncached or 0)),
    }


def _routes(snapshot: Snapshot, destination: str, num_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield each path to the decode cluster with its t, and the seconds that a transfer and a local prefill take."""
    clusters = {instance.cluster for instance in snapshot.instances if instance.cluster_kind == "prfaas"}
    for source in sorted(clusters):
        path = snapshot.path(source, ClusterName(destination))
        yield {
            "source": source,
            "destination": destination,
            "threshold_tokens": path.threshold_tokens,
            "is_abundant": path.is_abundant,
            "is_down": (source, destination) in snapshot.links_down,
            "transfer_seconds": path.cost.transfer_seconds(num_tokens) if path.cost else None,
            "local_prefill_seconds": path.cost.prefill_seconds(num_tokens) if path.cost else None,
        }


def router_phases(route: str, ttft_seconds: float, *, decide_seconds: float, prefill_seconds: float) -> Phases:
    """Return the phases that the router alone knows. They add up to the time to first token."""
    decide = within(decide_seconds, ttft_seconds)
    left = ttft_seconds - decide
    if route != "remote":
        return {"decide": decide, "engine": left}
    leg = within(prefill_seconds, left) if prefill_seconds > 0 else left
    return {"decide": decide, "leg": leg, "handover": left - leg}


def within(seconds: float, most: float) -> float:
    """Return a reported duration, at least 0 and at most `most`."""
    return min(seconds, most) if seconds > 0 else 0.0
