"""Twin of a planned deployment: a scenario's settings, and the nodes, network and rules that they lead to."""

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
from prfaas.model.deployment import Deployment, PdCluster
from prfaas.model.planning.plan import Plan
from prfaas.scheduler.colocation import SharingPolicy
from prfaas.scheduler.ppd import PpdTable, read_measured
from prfaas.scheduler.snapshot import InstanceState, LocalPolicy, Snapshot
from prfaas.sim.model import faults
from prfaas.sim.model.engine import InstanceSpec
from prfaas.sim.model.faults import CrossTraffic, PlannedEvents
from prfaas.sim.model.network import CongestionControl, LossyPath
from prfaas.sim.model.prefix_cache import CacheRules
from prfaas.sim.model.sharing import SharingSpec, SharingSpeeds, modelled_speeds, read_sharing
from prfaas.sim.scenario import Scenario
from prfaas.sim.twin import DEFAULT_CACHE_BLOCKS, FollowUp, NetworkSpec, RoutingRules, SimulatedNode, Twin, Watch
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole

_LOCAL_POLICIES: dict[str, LocalPolicy] = {"decode": "decode", "pd": "pd", "ppd": "ppd", "suffix": "suffix"}
_LONGER_THAN_ANY = 1 << 62


@dataclass(frozen=True)
class InstanceSettings:
    """Settings of a twin of instances.

    `requests_per_second` selects the row of PPD's table. `seed` is for cross traffic. `kv_tokens` is the KV memory of
    each PD engine; None takes the profile's. With `speeds`, PD instances prefill and decode at the same time.
    """

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
    seed: int = 0
    max_sessions: float = float("inf")
    events: PlannedEvents = field(default_factory=PlannedEvents)
    kv_tokens: float | None = None
    preempts: bool = True
    speeds: SharingSpeeds | None = None


def instance_settings(scenario: Scenario, rate: float) -> InstanceSettings:
    """Return the settings of a scenario at `rate` requests per second.

    Raises:
        ConfigError: the PPD table, the profile of shared devices or a planned event cannot be used.
    """
    tokens, block_tokens = scenario.cache_tokens, scenario.block_tokens
    return InstanceSettings(
        local_policy="decode" if scenario.shared else _LOCAL_POLICIES[scenario.local_policy],
        non_cached_tokens=scenario.non_cached_tokens,
        ppd_table=None if scenario.ppd_table is None else _read_ppd_table(scenario.ppd_table),
        requests_per_second=rate,
        chunk_tokens=scenario.chunk_tokens,
        kv_tokens=scenario.kv_tokens,
        preempts=scenario.preemption,
        cache_blocks=DEFAULT_CACHE_BLOCKS if tokens is None else tokens // block_tokens,
        caches=CacheRules(block_tokens, policy_of(scenario.eviction), scenario.announce),
        num_layers=scenario.layers,
        path=lossy_path(scenario),
        cross_traffic=faults.read_cross_traffic(scenario.cross_traffic),
        follows_congestion=scenario.congestion,
        seed=scenario.seed,
        events=PlannedEvents(
            faults.read_outages(scenario.outages),
            faults.read_role_changes(scenario.role_changes),
            faults.read_egress_changes(scenario.link_changes),
            scenario.heartbeats,
        ),
        speeds=sharing_speeds(scenario) if scenario.shared else None,
    )


def sharing_speeds(scenario: Scenario) -> SharingSpeeds:
    """Return the speeds on a shared device: measured if the scenario names a profile, else RAPID-Serve's.

    Raises:
        ConfigError: as in `read_sharing`.
    """
    return modelled_speeds() if scenario.sharing_profile is None else read_sharing(scenario.sharing_profile)


def lossy_path(scenario: Scenario) -> LossyPath:
    """Return the path between clusters."""
    control: CongestionControl = "cubic" if scenario.congestion_control == "cubic" else "bbr"
    return LossyPath(scenario.rtt, scenario.link_loss or 0.0, scenario.connections, control)


def _read_ppd_table(path: Path) -> PpdTable:
    try:
        return read_measured(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"ppd_table: {path}: {error}; write a file as prfaas-ppd writes it, in JSON") from error


def threshold_tokens(plan: Plan) -> int:
    """Return t of a plan as the scheduler takes it, also if everything or nothing is offloaded."""
    if plan.threshold_tokens is not None:
        return plan.threshold_tokens
    return 0 if plan.offload_ratio else _LONGER_THAN_ANY


def deploy(
    deployment: Deployment,
    workload: Workload,
    plan: Plan,
    settings: InstanceSettings,
    *,
    follow_up: FollowUp | None = None,
    watch: Watch | None = None,
) -> Twin:
    """Return the twin of a deployment under a plan. N_p instances of each PD cluster prefill, the rest decode."""
    path = settings.path
    egress = {ClusterName(cluster.name): path.payload_rate(deployment.egress(cluster)) for cluster in deployment.prfaas}
    network = NetworkSpec(
        deployment.model.curve(),
        egress,
        num_layers=settings.num_layers,
        rtt_seconds=path.rtt_seconds,
        loss_ratio=path.loss_ratio,
    )
    rules = RoutingRules(
        Snapshot(
            threshold_tokens(plan),
            (),
            local_policy=settings.local_policy,
            non_cached_tokens=settings.non_cached_tokens,
            ppd_table=settings.ppd_table,
            requests_per_second=settings.requests_per_second,
        ),
        settings.caches,
        max_sessions=settings.max_sessions,
        events=settings.events,
        follows_congestion=settings.follows_congestion,
    )
    return Twin(_nodes(deployment, workload, plan, settings), network, rules, follow_up=follow_up, watch=watch)


def refuse_longer_than_memory(twin: Twin, longest_tokens: int) -> None:
    """Raise ConfigError if an engine's KV memory cannot hold the longest request, which vLLM would refuse."""
    room = min(instance.kv_tokens for instance in twin.instances.values())
    if longest_tokens > room:
        raise ConfigError(
            f"kv_tokens: {room:g} do not hold the longest request, whose prompt and answer are {longest_tokens} tokens; "
            f"write at least {longest_tokens}"
        )


def with_bursts(settings: InstanceSettings, deployment: Deployment, *, end: float) -> InstanceSettings:
    """Return the settings with bursts of cross traffic until `end` over the egress of each PrfaaS cluster."""
    if settings.cross_traffic is None:
        return settings
    clusters = [ClusterName(cluster.name) for cluster in deployment.prfaas]
    bursts = faults.draw_bursts(settings.cross_traffic, clusters, end=end, seed=settings.seed)
    changes = (*settings.events.egress_changes, *bursts)
    return replace(settings, events=replace(settings.events, egress_changes=changes))


def _nodes(
    deployment: Deployment, workload: Workload, plan: Plan, settings: InstanceSettings
) -> Iterator[SimulatedNode]:
    for cluster in deployment.prfaas:
        spec = InstanceSpec(cluster.profile.prefill, None)
        for index in range(cluster.num_instances):
            yield SimulatedNode(_state(cluster.name, "prfaas", index, "prefill"), spec, settings.cache_blocks)
    for pd, split in zip(deployment.pd, plan.splits, strict=True):
        spec = _pd_spec(pd, deployment, workload, settings)
        num_prefill = round(split.num_prefill)
        for index in range(pd.num_instances):
            role: InstanceRole = "prefill" if index < num_prefill else "decode"
            sharing = None
            if settings.speeds is not None:
                role, policy = "both", SharingPolicy(1.0 / deployment.objectives.decode_tokens_per_second)
                sharing = SharingSpec(policy, settings.speeds, workload.output.mean_context_tokens)
            yield SimulatedNode(_state(pd.name, "pd", index, role), spec, settings.cache_blocks, sharing)


def _pd_spec(pd: PdCluster, deployment: Deployment, workload: Workload, settings: InstanceSettings) -> InstanceSpec:
    """Return an engine whose largest batch meets the objective, with the slower steps of a shared device."""
    if settings.speeds is not None:
        rate = deployment.objectives.decode_tokens_per_second / settings.speeds.best_decode_speed
        deployment = replace(deployment, objectives=replace(deployment.objectives, decode_tokens_per_second=rate))
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


def _state(cluster: str, kind: ClusterKind, index: int, role: InstanceRole) -> InstanceState:
    name = f"{cluster}-{index:03d}"
    return InstanceState(InstanceId(name), ClusterName(cluster), kind, role, AgentName(name))
