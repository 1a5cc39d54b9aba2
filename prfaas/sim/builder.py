"""How a scenario's instances work beyond their profiles: policy within the PD cluster, chunks, caches, transfers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from prfaas.cachepool.eviction import policy_of
from prfaas.errors import ConfigError
from prfaas.model.capacity.decoding import decode_capacity
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment, PdCluster, PrfaasCluster
from prfaas.model.planning.plan import Plan
from prfaas.scheduler.colocation import SharingPolicy
from prfaas.scheduler.ppd import PpdTable, read_measured
from prfaas.scheduler.snapshot import InstanceState, LocalPolicy, Snapshot
from prfaas.sim.model.engine import InstanceSpec
from prfaas.sim.model.faults import (
    CrossTraffic,
    PlannedEvents,
    bursts,
    read_cross_traffic,
    read_link_changes,
    read_outages,
    read_role_changes,
)
from prfaas.sim.model.network import CongestionControl, LossyPath
from prfaas.sim.model.prefix_cache import CacheRules
from prfaas.sim.model.sharing import ModelledSharing, SharingSpec, SharingSpeeds, read_sharing
from prfaas.sim.scenario import Scenario
from prfaas.sim.twin import DEFAULT_CACHE_BLOCKS, FollowUp, NetworkSpec, RoutingRules, SimulatedNode, Twin, Watch
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole

_LOCAL_POLICIES: dict[str, LocalPolicy] = {"decode": "decode", "pd": "pd", "ppd": "ppd", "suffix": "suffix"}


@dataclass(frozen=True)
class InstanceSettings:
    """What prefills within the PD cluster is `local_policy`; `requests_per_second` is what PPD's table is read at."""

    local_policy: LocalPolicy = "pd"
    non_cached_tokens: int = 0
    ppd_table: PpdTable | None = None
    requests_per_second: float = 0.0
    chunk_tokens: int | None = None
    cache_blocks: int = DEFAULT_CACHE_BLOCKS
    caches: CacheRules = field(default_factory=lambda: CacheRules(block_tokens=512))
    num_layers: int = 1
    path: LossyPath = field(default_factory=LossyPath)
    cross_traffic: CrossTraffic | None = None
    follows_congestion: bool = False
    seed: int = 0  # of what others send
    max_sessions: float = float("inf")
    operations: PlannedEvents = field(default_factory=PlannedEvents)
    kv_tokens: float | None = None  # of each PD engine; the profile's memory when None
    preempts: bool = True
    interference: SharingSpeeds | None = None  # PD instances that prefill and decode at the same time


def instance_settings(scenario: Scenario, rate: float) -> InstanceSettings:
    """Return the scenario's.

    Raises:
        ConfigError: the PPD table, an outage, a role change or a change of a link cannot be used.
    """
    tokens, block_tokens = scenario.cache_tokens, scenario.block_tokens
    return InstanceSettings(
        local_policy="decode" if scenario.shared else _LOCAL_POLICIES[scenario.local_policy],
        non_cached_tokens=scenario.non_cached_tokens,
        ppd_table=None if scenario.ppd_table is None else _ppd_table(scenario.ppd_table),
        requests_per_second=rate,
        chunk_tokens=scenario.chunk_tokens,
        kv_tokens=scenario.kv_tokens,
        preempts=scenario.preemption,
        cache_blocks=DEFAULT_CACHE_BLOCKS if tokens is None else tokens // block_tokens,
        caches=CacheRules(block_tokens, policy_of(scenario.eviction), scenario.announce),
        num_layers=scenario.layers,
        path=lossy_path(scenario),
        cross_traffic=read_cross_traffic(scenario.cross_traffic),
        follows_congestion=scenario.congestion,
        seed=scenario.seed,
        operations=PlannedEvents(
            read_outages(scenario.outages),
            read_role_changes(scenario.role_changes),
            read_link_changes(scenario.link_changes),
            scenario.heartbeats,
        ),
        interference=speeds(scenario) if scenario.shared else None,
    )


def speeds(scenario: Scenario) -> SharingSpeeds:
    """Of two sides that share a device: measured where the scenario names a profile, else RAPID-Serve's.

    Raises:
        ConfigError: as `read_sharing`.
    """
    return ModelledSharing() if scenario.sharing_profile is None else read_sharing(scenario.sharing_profile)


def lossy_path(scenario: Scenario) -> LossyPath:
    """Between clusters."""
    control: CongestionControl = "cubic" if scenario.congestion_control == "cubic" else "bbr"
    return LossyPath(scenario.rtt, scenario.link_loss or 0.0, scenario.connections, control)


def _ppd_table(path: Path) -> PpdTable:
    try:
        return read_measured(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"ppd_table: {path}: {error}; write a file as prfaas-ppd writes it, in JSON") from error


NOTHING_IS_LONGER = 1 << 62


def threshold_tokens(plan: Plan) -> int:
    """t of a plan as the scheduler takes it, also where everything or nothing is offloaded."""
    if plan.threshold_tokens is not None:
        return plan.threshold_tokens
    return 0 if plan.offload_ratio else NOTHING_IS_LONGER


def deploy(
    deployment: Deployment,
    workload: Workload,
    plan: Plan,
    settings: InstanceSettings,
    *,
    follow_up: FollowUp | None = None,
    watch: Watch | None = None,
) -> Twin:
    """Return the twin of a deployment under a plan; N_p instances of each PD cluster prefill, the others decode."""
    snapshot = Snapshot(
        threshold_tokens(plan),
        (),
        local_policy=settings.local_policy,
        non_cached_tokens=settings.non_cached_tokens,
        ppd_table=settings.ppd_table,
        requests_per_second=settings.requests_per_second,
    )
    path = settings.path
    egress = {ClusterName(cluster.name): path.carried(deployment.egress(cluster)) for cluster in deployment.prfaas}
    wires = NetworkSpec(
        deployment.model.curve(),
        egress,
        num_layers=settings.num_layers,
        rtt_seconds=path.rtt_seconds,
        loss_ratio=path.loss_ratio,
    )
    rules = RoutingRules(
        snapshot,
        settings.caches,
        max_sessions=settings.max_sessions,
        operations=settings.operations,
        follows_congestion=settings.follows_congestion,
    )
    return Twin(_nodes(deployment, workload, plan, settings), wires, rules, follow_up=follow_up, watch=watch)


def refuse_longer_than_memory(twin: Twin, longest_tokens: int) -> None:
    """Raise ConfigError where an engine's KV memory does not hold the longest request, prompt and answer: vLLM refuses it."""
    room = min(instance.kv_tokens for instance in twin.instances.values())
    if longest_tokens > room:
        raise ConfigError(
            f"kv_tokens: {room:g} do not hold the longest request, whose prompt and answer are {longest_tokens} tokens; "
            f"write at least {longest_tokens}"
        )


def with_bursts(settings: InstanceSettings, deployment: Deployment, *, end: float) -> InstanceSettings:
    """Return the settings with what others send until `end` drawn, over the egress of each PrfaaS cluster."""
    if settings.cross_traffic is None:
        return settings
    clusters = [ClusterName(cluster.name) for cluster in deployment.prfaas]
    drawn = bursts(settings.cross_traffic, clusters, end=end, seed=settings.seed)
    operations = settings.operations
    return replace(settings, operations=replace(operations, link_changes=(*operations.link_changes, *drawn)))


def _nodes(
    deployment: Deployment, workload: Workload, plan: Plan, settings: InstanceSettings
) -> Iterator[SimulatedNode]:
    for cluster in deployment.prfaas:
        yield from _prfaas(cluster, settings)
    for pd, split in zip(deployment.pd, plan.splits, strict=True):
        decode = _decode_spec(pd, deployment, workload, settings)
        num_prefill = round(split.num_prefill)
        for index in range(pd.num_instances):
            role: InstanceRole = "prefill" if index < num_prefill else "decode"
            sharing = None
            if settings.interference is not None:
                role, policy = "both", SharingPolicy(1.0 / deployment.objectives.decode_tokens_per_second)
                sharing = SharingSpec(policy, settings.interference, workload.output.mean_context_tokens)
            yield SimulatedNode(_state(pd.name, "pd", index, role), decode, settings.cache_blocks, sharing)


def _decode_spec(pd: PdCluster, deployment: Deployment, workload: Workload, settings: InstanceSettings) -> InstanceSpec:
    """With the batch that its objective allows, the slower steps of a shared device counted."""
    if settings.interference is not None:
        slower = settings.interference.best_decode_speed
        objectives = deployment.objectives
        asked = replace(objectives, decode_tokens_per_second=objectives.decode_tokens_per_second / slower)
        deployment = replace(deployment, objectives=asked)
    capacity = decode_capacity(pd, deployment, workload)
    memory, token = pd.profile.kv_memory_bytes, deployment.model.bytes_per_token
    kv_tokens = memory / token if memory and token else math.inf
    return InstanceSpec(
        pd.profile.prefill,
        pd.profile.decode,
        capacity.max_batch,
        kv_tokens if settings.kv_tokens is None else settings.kv_tokens,
        chunk_tokens=settings.chunk_tokens,
        preempts=settings.preempts,
    )


def _prfaas(cluster: PrfaasCluster, settings: InstanceSettings) -> Iterator[SimulatedNode]:
    spec = InstanceSpec(cluster.profile.prefill, None)
    for index in range(cluster.num_instances):
        yield SimulatedNode(_state(cluster.name, "prfaas", index, "prefill"), spec, settings.cache_blocks)


def _state(cluster: str, kind: ClusterKind, index: int, role: InstanceRole) -> InstanceState:
    name = f"{cluster}-{index:03d}"
    return InstanceState(InstanceId(name), ClusterName(cluster), kind, role, AgentName(name))
