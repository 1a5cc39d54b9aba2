"""A planned deployment as instances, caches and links: what the solver's clusters and split become in the twin."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from prfaas.model.decoding import decode_capacity
from prfaas.model.deployment import Deployment, PdCluster, PrfaasCluster
from prfaas.model.plan import Plan
from prfaas.model.workload import Workload
from prfaas.scheduler.colocation import Policy
from prfaas.scheduler.snapshot import InstanceState, Snapshot
from prfaas.sim.engine_settings import EngineSettings
from prfaas.sim.instance import EngineSpec
from prfaas.sim.shared_instance import SharingSpec
from prfaas.sim.twin import FollowUp, Node, Rules, Twin, Watch, Wires
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
    settings: EngineSettings,
    *,
    follow_up: FollowUp | None = None,
    watch: Watch | None = None,
) -> Twin:
    """The twin of a deployment under a plan; N_p instances of each PD cluster prefill, the others decode."""
    snapshot = Snapshot(
        threshold_tokens(plan),
        (),
        local_policy=settings.local_policy,
        non_cached_tokens=settings.non_cached_tokens,
        ppd_table=settings.ppd_table,
        requests_per_second=settings.requests_per_second,
    )
    egress = {ClusterName(cluster.name): deployment.egress(cluster) for cluster in deployment.prfaas}
    wires = Wires(deployment.model.curve(), egress, num_layers=settings.num_layers, rtt_seconds=settings.rtt_seconds)
    rules = Rules(snapshot, settings.caches, max_sessions=settings.max_sessions, operations=settings.operations)
    return Twin(_nodes(deployment, workload, plan, settings), wires, rules, follow_up=follow_up, watch=watch)


def _nodes(deployment: Deployment, workload: Workload, plan: Plan, settings: EngineSettings) -> Iterator[Node]:
    for cluster in deployment.prfaas:
        yield from _prfaas(cluster, settings)
    for pd, split in zip(deployment.pd, plan.splits, strict=True):
        decode = _decode_spec(pd, deployment, workload, settings)
        num_prefill = round(split.num_prefill)
        for index in range(pd.num_instances):
            role: InstanceRole = "prefill" if index < num_prefill else "decode"
            sharing = None
            if settings.interference is not None:
                role, policy = "both", Policy(1.0 / deployment.objectives.decode_tokens_per_second)
                sharing = SharingSpec(policy, settings.interference, workload.output.mean_context_tokens)
            yield Node(_state(pd.name, "pd", index, role), decode, settings.cache_blocks, sharing)


def _decode_spec(pd: PdCluster, deployment: Deployment, workload: Workload, settings: EngineSettings) -> EngineSpec:
    """With the batch that its objective allows, the slower steps of a shared device counted."""
    if settings.interference is not None:
        slower = 1.0 - settings.interference.decode_memory_ratio
        objectives = deployment.objectives
        asked = replace(objectives, decode_tokens_per_second=objectives.decode_tokens_per_second / slower)
        deployment = replace(deployment, objectives=asked)
    capacity = decode_capacity(pd, deployment, workload)
    memory, token = pd.profile.kv_memory_bytes, deployment.model.bytes_per_token
    kv_tokens = memory / token if memory and token else math.inf
    return EngineSpec(
        pd.profile.prefill, pd.profile.decode, capacity.max_batch, kv_tokens, chunk_tokens=settings.chunk_tokens
    )


def _prfaas(cluster: PrfaasCluster, settings: EngineSettings) -> Iterator[Node]:
    spec = EngineSpec(cluster.profile.prefill, None)
    for index in range(cluster.num_instances):
        yield Node(_state(cluster.name, "prfaas", index, "prefill"), spec, settings.cache_blocks)


def _state(cluster: str, kind: ClusterKind, index: int, role: InstanceRole) -> InstanceState:
    name = f"{cluster}-{index:03d}"
    return InstanceState(InstanceId(name), ClusterName(cluster), kind, role, AgentName(name))
