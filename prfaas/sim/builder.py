"""Twin of a planned deployment: the nodes, network and rules that a scenario leads to."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from prfaas.errors import ConfigError
from prfaas.model.capacity.decoding import decode_capacity
from prfaas.model.cost.colocation import SharingSpeeds
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment, PdCluster
from prfaas.model.planning.egress_threshold import at_egress_price
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.planner import best_plan
from prfaas.scheduler.colocation import SharingPolicy
from prfaas.scheduler.endpoint_picker.config import load
from prfaas.scheduler.ppd import PpdTable, read_measured
from prfaas.scheduler.snapshot import InstanceState, Snapshot
from prfaas.sim.model import faults
from prfaas.sim.model.engine import InstanceSpec
from prfaas.sim.model.faults import PlannedEvents
from prfaas.sim.model.policies import PolicyRules
from prfaas.sim.model.prefix_cache import CacheRules
from prfaas.sim.model.sharing import SharingSpec, modelled_speeds
from prfaas.sim.scenario import Scenario
from prfaas.sim.twin import DEFAULT_CACHE_BLOCKS, FollowUp, NetworkSpec, RoutingRules, SimulatedNode, Twin, Watch
from prfaas.solve.files.profile_file import read_profile
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole, LocalPolicy

_LONGER_THAN_ANY = 1 << 62
_HEDGE_SECONDS = 2.0  # Default of the connector's `silence_seconds`.


def sharing_speeds(scenario: Scenario, pd: PdCluster) -> SharingSpeeds | None:
    """Return the speeds on shared devices, or None: measured if there is a profile of them, else RAPID-Serve's.

    Raises:
        ConfigError: the profile cannot be read, or nothing was measured on a shared device.
    """
    if not scenario.shared:
        return None
    if scenario.sharing_profile is None:
        return pd.profile.sharing or modelled_speeds()
    speeds = read_profile(scenario.sharing_profile).sharing
    if speeds is None:
        raise ConfigError(f"{scenario.sharing_profile}: needs steps of decode alone, and colocation")
    return speeds


def threshold_tokens(plan: Plan) -> int:
    """Return t of a plan as the scheduler takes it, also if everything or nothing is offloaded."""
    if plan.threshold_tokens is not None:
        return plan.threshold_tokens
    return 0 if plan.offload_ratio else _LONGER_THAN_ANY


def deploy(
    deployment: Deployment,
    workload: Workload,
    plan: Plan,
    scenario: Scenario,
    *,
    rate: float = 0.0,
    follow_up: FollowUp | None = None,
    watch: Watch | None = None,
) -> Twin:
    """Return the twin of a deployment under a plan. N_p instances of each PD cluster prefill, the rest decode.

    `rate` in requests per second selects the row of PPD's table.

    Raises:
        ConfigError: the PPD table, the profile of shared devices or a planned event cannot be used.
    """
    network = NetworkSpec(
        deployment.model.curve(),
        {ClusterName(cluster.name): deployment.egress(cluster) for cluster in deployment.prfaas},
        num_layers=scenario.layers,
        rtt_seconds=scenario.rtt,
    )
    rules = RoutingRules(
        Snapshot(
            threshold_tokens(plan),
            (),
            local_policy="decode" if scenario.shared else cast("LocalPolicy", scenario.local_policy),
            ppd_table=None if scenario.ppd_table is None else _read_ppd_table(scenario.ppd_table),
            endpoint_picker=_read_endpoint_picker(scenario.endpoint_picker),
            requests_per_second=rate,
            local_turns_ratio=scenario.local_turns_ratio,
            routes=plan.routes,
        ),
        CacheRules(scenario.block_tokens, scenario.announce),
        events=PlannedEvents(
            faults.read_outages(scenario.outages),
            faults.read_role_changes(scenario.role_changes),
            faults.read_egress_changes(scenario.link_changes),
            scenario.heartbeats,
        ),
        follows_congestion=scenario.congestion,
        hedge_seconds=_HEDGE_SECONDS if scenario.hedge else math.inf,
        thresholds_by_hour=()
        if scenario.threshold is not None
        else _priced_thresholds(deployment, workload, plan, rate),
        policies=_policies(deployment, workload, plan, scenario),
    )
    return Twin(_nodes(deployment, workload, plan, scenario), network, rules, follow_up=follow_up, watch=watch)


def _priced_thresholds(
    deployment: Deployment, workload: Workload, plan: Plan, rate: float
) -> tuple[tuple[float, int], ...]:
    """Return t from each hour at which a price of egress changes, as managers plan it; empty without prices."""
    prices = [cluster.egress_price for cluster in deployment.prfaas if cluster.egress_price is not None]
    hours = sorted(set().union(*(price.change_hours for price in prices)))
    at_price = partial(at_egress_price, plan, deployment, workload, requests_per_second=rate)
    return tuple((hour, threshold_tokens(at_price(hour=hour))) for hour in hours)


def _policies(deployment: Deployment, workload: Workload, plan: Plan, scenario: Scenario) -> PolicyRules:
    rules = PolicyRules(rebalance_bytes_per_second=scenario.rebalance, refreshes_ppd=scenario.ppd_table is not None)
    if not scenario.role_policy:
        return rules
    free = replace(deployment, pd=tuple(replace(pd, num_prefill=None) for pd in deployment.pd))
    best = best_plan(free, workload)
    return replace(
        rules,
        best_num_prefill={ClusterName(split.cluster): split.num_prefill for split in best.splits},
        gain_ratio=best.system_throughput / plan.system_throughput - 1 if plan.system_throughput else math.inf,
        max_batch=decode_capacity(deployment.pd[0], deployment, workload).max_batch,
    )


def _read_endpoint_picker(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"endpoint_picker: {path}: {error}") from error
    load(text, name=f"endpoint_picker: {path}")
    return text


def _read_ppd_table(path: Path) -> PpdTable:
    try:
        return read_measured(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"ppd_table: {path}: {error}; write a file as prfaas-ppd writes it, in JSON") from error


def refuse_longer_than_memory(twin: Twin, longest_tokens: int) -> None:
    """Raise ConfigError if an engine's KV memory cannot hold the longest request, which vLLM would refuse."""
    room = min(instance.kv_tokens for instance in twin.instances.values())
    if longest_tokens > room:
        raise ConfigError(
            f"kv_tokens: {room:g} do not hold the longest request, whose prompt and answer are {longest_tokens} tokens; "
            f"write at least {longest_tokens}"
        )


def _nodes(deployment: Deployment, workload: Workload, plan: Plan, scenario: Scenario) -> Iterator[SimulatedNode]:
    tokens = scenario.cache_tokens
    cache_blocks = DEFAULT_CACHE_BLOCKS if tokens is None else tokens // scenario.block_tokens
    for cluster in deployment.prfaas:
        spec = InstanceSpec(cluster.profile.prefill, None)
        for index in range(cluster.num_instances):
            yield SimulatedNode(_state(cluster.name, "prfaas", index, "prefill"), spec, cache_blocks)
    for pd, split in zip(deployment.pd, plan.splits, strict=True):
        speeds = sharing_speeds(scenario, pd)
        spec = _pd_spec(pd, deployment, workload, scenario, speeds)
        is_measured = scenario.sharing_profile is not None or pd.profile.sharing is not None
        policy = SharingPolicy(1.0 / deployment.objectives.decode_tokens_per_second, is_paced=is_measured)
        num_prefill = round(split.num_prefill)
        for index in range(pd.num_instances):
            role: InstanceRole = "prefill" if index < num_prefill else "decode"
            sharing = None
            if speeds is not None:
                role = "both"
                sharing = SharingSpec(policy, speeds, workload.output.mean_context_tokens)
            yield SimulatedNode(_state(pd.name, "pd", index, role), spec, cache_blocks, sharing)


def _pd_spec(
    pd: PdCluster, deployment: Deployment, workload: Workload, scenario: Scenario, speeds: SharingSpeeds | None
) -> InstanceSpec:
    """Return an engine whose largest batch meets the objective, with the slower steps of a shared device."""
    if speeds is not None:
        rate = deployment.objectives.decode_tokens_per_second / speeds.best_decode_speed
        deployment = replace(deployment, objectives=replace(deployment.objectives, decode_tokens_per_second=rate))
    capacity = decode_capacity(pd, deployment, workload)
    memory, token = pd.profile.kv_memory_bytes, deployment.model.bytes_per_token
    kv_tokens = memory / token if memory and token else math.inf
    return InstanceSpec(
        pd.profile.prefill,
        pd.profile.decode,
        capacity.max_batch,
        kv_tokens if scenario.kv_tokens is None else scenario.kv_tokens,
        chunk_tokens=scenario.chunk_tokens,
    )


def _state(cluster: str, kind: ClusterKind, index: int, role: InstanceRole) -> InstanceState:
    name = f"{cluster}-{index:03d}"
    return InstanceState(InstanceId(name), ClusterName(cluster), kind, role, AgentName(name))
