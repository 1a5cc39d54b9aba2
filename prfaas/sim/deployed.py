"""A planned deployment as instances, caches and links: what the solver's clusters and split become in the twin."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from prfaas.errors import ConfigError
from prfaas.model.cost.decoding import decode_capacity
from prfaas.model.cost.workload import Workload
from prfaas.model.planning.deployment import Deployment, PdCluster, PrfaasCluster
from prfaas.model.planning.plan import Plan
from prfaas.scheduler.colocation import SharingPolicy
from prfaas.scheduler.snapshot import InstanceState, Snapshot
from prfaas.sim.config.instances import InstanceSettings
from prfaas.sim.model.blueprint import FollowUp, Node, Rules, Watch, Wires
from prfaas.sim.model.colocated import SharingSpec
from prfaas.sim.model.engine import InstanceSpec
from prfaas.sim.model.link_faults import bursts
from prfaas.sim.twin import Twin
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole

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
    wires = Wires(
        deployment.model.curve(),
        egress,
        num_layers=settings.num_layers,
        rtt_seconds=path.rtt_seconds,
        loss_ratio=path.loss_ratio,
    )
    rules = Rules(
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


def _nodes(deployment: Deployment, workload: Workload, plan: Plan, settings: InstanceSettings) -> Iterator[Node]:
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
            yield Node(_state(pd.name, "pd", index, role), decode, settings.cache_blocks, sharing)


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


def _prfaas(cluster: PrfaasCluster, settings: InstanceSettings) -> Iterator[Node]:
    spec = InstanceSpec(cluster.profile.prefill, None)
    for index in range(cluster.num_instances):
        yield Node(_state(cluster.name, "prfaas", index, "prefill"), spec, settings.cache_blocks)


def _state(cluster: str, kind: ClusterKind, index: int, role: InstanceRole) -> InstanceState:
    name = f"{cluster}-{index:03d}"
    return InstanceState(InstanceId(name), ClusterName(cluster), kind, role, AgentName(name))
