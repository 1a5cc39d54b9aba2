"""Gauges of a manager's present state, set when /metrics is read."""

from collections import Counter

from prfaas import metrics
from prfaas.manager.planning.paths import Paths
from prfaas.manager.record.replication import Replication
from prfaas.manager.routing.router import RequestRouter
from prfaas.manager.state.world import World, silent_instances


def refresh_gauges(world: World, *, paths: Paths, routing: RequestRouter, replication: Replication) -> None:
    """Set all gauges to the present state."""
    _set_members(world)
    _set_links(paths)
    _set_holdings(world)
    _set_plan(world)
    metrics.MANAGER_SESSIONS.set(routing.num_sessions())
    metrics.THRESHOLD_TOKENS.set(routing.threshold_tokens)
    metrics.MANAGER_BLOCKS.set(world.index.num_blocks())
    metrics.MANAGER_WRITES.set(replication.num_written)
    metrics.MANAGER_RECORD_UP.set(replication.is_recording and not replication.is_stale)


def _set_members(world: World) -> None:
    nodes, silent, running, waiting = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    instances = Counter[tuple[str, str]]()
    for member in world.live():
        cluster = member.node.cluster
        nodes[cluster] += 1
        silent[cluster] += len(silent_instances(member))
        instances.update((cluster, engine.role) for engine in member.node.engines)
        running[cluster] += sum(load.num_running for load in member.figures.engines)
        waiting[cluster] += sum(load.num_waiting for load in member.figures.engines)
    for gauge, counts in (
        (metrics.MANAGER_NODES, nodes),
        (metrics.MANAGER_SILENT, silent),
        (metrics.MANAGER_RUNNING, running),
        (metrics.MANAGER_WAITING, waiting),
    ):
        gauge.clear()
        for name, count in counts.items():
            gauge.labels(cluster=name).set(count)
    metrics.MANAGER_INSTANCES.clear()
    for (name, role), count in instances.items():
        metrics.MANAGER_INSTANCES.labels(cluster=name, role=role).set(count)


def _set_links(paths: Paths) -> None:
    gauges = (
        metrics.PATH_GOODPUT,
        metrics.PATH_CAPACITY,
        metrics.PATH_QUEUED,
        metrics.PATH_UP,
        metrics.PATH_MULTIPLIER,
    )
    for gauge in gauges:
        gauge.clear()
    for view in paths.views():
        labels = {"source": view.source, "destination": view.destination}
        metrics.PATH_GOODPUT.labels(**labels).set(view.bytes_per_second)
        metrics.PATH_CAPACITY.labels(**labels).set(view.capacity_bytes_per_second)
        metrics.PATH_QUEUED.labels(**labels).set(view.queued_bytes)
        metrics.PATH_UP.labels(**labels).set(not view.is_down)
        metrics.PATH_MULTIPLIER.labels(**labels).set(view.congestion.multiplier)


def _set_holdings(world: World) -> None:
    metrics.MANAGER_HELD_BLOCKS.clear()
    metrics.MANAGER_HELD_BYTES.clear()
    for holding in world.holdings():
        labels = {"cluster": holding["cluster"], "group": holding["kind"], "tier": holding["tier"]}
        metrics.MANAGER_HELD_BLOCKS.labels(**labels).inc(holding["num_blocks"])
        metrics.MANAGER_HELD_BYTES.labels(**labels).inc(holding["num_bytes"])


def _set_plan(world: World) -> None:
    metrics.MANAGER_NEEDED_INSTANCES.clear()
    metrics.RESOURCE_VALUE.clear()
    if world.plan is None:
        return
    for cluster, counts in world.plan.needed_instances.items():
        for role, count in counts.items():
            metrics.MANAGER_NEEDED_INSTANCES.labels(cluster=cluster, role=role).set(count)
    for resource, value in world.plan.resource_values.items():
        metrics.RESOURCE_VALUE.labels(resource=resource).set(value)
