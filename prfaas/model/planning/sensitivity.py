"""Sensitivity of the plan to an error in each of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from prfaas.errors import ConfigError
from prfaas.model.cost.workload import OutputTokens, Workload, half_output_tokens
from prfaas.model.deployment import Deployment, Objectives, PdCluster, PrfaasCluster
from prfaas.model.kv.geometry import Geometry
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.planner import relaxed_plan

C = TypeVar("C", PrfaasCluster, PdCluster)
Input = tuple[Deployment, Workload]
Change = Callable[[Deployment, Workload, float], Input]


@dataclass(frozen=True)
class Sensitivity:
    """Plan to compare with, and by input the best plans with less and with more of it; None if no plan then serves."""

    base: Plan
    plans: Mapping[str, tuple[Plan | None, Plan | None]]


def sensitivity(deployment: Deployment, workload: Workload, *, step: float = 0.2) -> Sensitivity:
    """Return the best plans with each input lower and higher by `step`.

    With several PD clusters the splits of all compared plans need not be whole.
    """

    def varied(change: Change, factor: float) -> Plan | None:
        try:
            return relaxed_plan(*change(deployment, workload, factor))
        except ConfigError:
            return None

    changes = _changes(deployment).items()
    plans = {name: (varied(change, 1.0 - step), varied(change, 1.0 + step)) for name, change in changes}
    return Sensitivity(relaxed_plan(deployment, workload), plans)


def _changes(deployment: Deployment) -> dict[str, Change]:
    """Return each input's change by its name; clusters of one kind change together."""
    changes: dict[str, Change] = {}
    if deployment.prfaas:
        changes["remote prefill time"] = _of_prfaas(_slower_prefill)
        changes["egress and links"] = _wider
    changes["local prefill time"] = _of_pd(_slower_prefill)
    changes["decode step"] = _of_pd(_slower_decode)
    changes["decode objective"] = lambda d, w, f: (replace(d, objectives=_faster(d.objectives, f)), w)
    changes["KV bytes"] = lambda d, w, f: (replace(d, model=_larger(d.model, f)), w)
    changes["input lengths"] = lambda d, w, f: (d, _longer_prompts(w, f))
    changes["output tokens"] = lambda d, w, f: (d, replace(w, output=_longer_output(w.output, f)))
    return changes


def _longer_prompts(workload: Workload, factor: float) -> Workload:
    """Scale the prompts, and the context that decoding requests hold."""
    output = workload.output
    context = output.mean_context_tokens
    if context:
        context = factor * (context - half_output_tokens(output)) + half_output_tokens(output)
    output = replace(output, mean_context_tokens=context)
    return replace(workload, lengths=workload.lengths.scaled(factor), output=output)


def _longer_output(output: OutputTokens, factor: float) -> OutputTokens:
    context = output.mean_context_tokens
    if context:
        context += (factor - 1.0) * half_output_tokens(output)
    return replace(output, mean=output.mean * factor, mean_context_tokens=context)


def _of_prfaas(change: Callable[[PrfaasCluster, float], PrfaasCluster]) -> Change:
    return lambda d, w, f: (replace(d, prfaas=tuple(change(cluster, f) for cluster in d.prfaas)), w)


def _of_pd(change: Callable[[PdCluster, float], PdCluster]) -> Change:
    return lambda d, w, f: (replace(d, pd=tuple(change(cluster, f) for cluster in d.pd)), w)


def _slower_prefill(cluster: C, factor: float) -> C:
    profile = replace(cluster.profile, prefill=cluster.profile.prefill.times(factor))
    return replace(cluster, profile=profile)


def _slower_decode(cluster: PdCluster, factor: float) -> PdCluster:
    decode = cluster.profile.decode
    if decode is None:
        return cluster
    return replace(cluster, profile=replace(cluster.profile, decode=decode.times(factor)))


def _wider(deployment: Deployment, workload: Workload, factor: float) -> Input:
    paths = tuple(replace(path, bytes_per_second=path.bytes_per_second * factor) for path in deployment.paths)
    clusters = tuple(
        replace(cluster, egress_bytes_per_second=cluster.egress_bytes_per_second * factor)
        for cluster in deployment.prfaas
    )
    return replace(deployment, prfaas=clusters, paths=paths), workload


def _faster(objectives: Objectives, factor: float) -> Objectives:
    return replace(objectives, decode_tokens_per_second=objectives.decode_tokens_per_second * factor)


def _larger(model: Geometry, factor: float) -> Geometry:
    groups = (
        replace(g, bytes_per_token=round(g.bytes_per_token * factor), state_bytes=round(g.state_bytes * factor))
        for g in model.groups
    )
    return replace(model, groups=tuple(groups))
