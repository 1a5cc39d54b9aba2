"""How the plan answers to an error in each of its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from prfaas.model.deployment import Deployment, Link, Objectives, PdCluster, PrfaasCluster
from prfaas.model.geometry import Geometry, KVGroup
from prfaas.model.lengths import Empirical, Lengths, LogNormal, Mixture
from prfaas.model.loads import Method
from prfaas.model.plan import Plan
from prfaas.model.planning import best_plan
from prfaas.model.workload import Workload

C = TypeVar("C", PrfaasCluster, PdCluster)
Input = tuple[Deployment, Workload]
Change = Callable[[Deployment, Workload, float], Input]


@dataclass(frozen=True)
class Answer:
    """The best plan when one input is `factor` times what was assumed."""

    input_name: str
    factor: float
    plan: Plan


def sensitivity(deployment: Deployment, workload: Workload, *, method: Method, step: float = 0.2) -> list[Answer]:
    """Each input lower and higher by `step`, the plan found anew each time."""
    return [
        Answer(name, factor, best_plan(*change(deployment, workload, factor), method=method))
        for name, change in _changes(deployment).items()
        for factor in (1.0 - step, 1.0 + step)
    ]


def _changes(deployment: Deployment) -> dict[str, Change]:
    changes: dict[str, Change] = {}
    for index, cluster in enumerate(deployment.prfaas):
        changes[f"prefill time of {cluster.name}"] = _of_prfaas(index, _slower_prefill)
        changes[f"egress of {cluster.name}"] = _of_prfaas(index, _wider)
    for index, pd in enumerate(deployment.pd):
        changes[f"prefill time of {pd.name}"] = _of_pd(index, _slower_prefill)
        changes[f"decode step of {pd.name}"] = _of_pd(index, _slower_decode)
    if deployment.links:
        changes["links"] = lambda d, w, f: (replace(d, links=tuple(_wider_link(link, f) for link in d.links)), w)
    changes["decode objective"] = lambda d, w, f: (replace(d, objectives=_faster(d.objectives, f)), w)
    changes["KV bytes"] = lambda d, w, f: (replace(d, model=_larger(d.model, f)), w)
    changes["input lengths"] = lambda d, w, f: (d, replace(w, lengths=longer(w.lengths, f)))
    changes["output tokens"] = lambda d, w, f: (d, replace(w, output=replace(w.output, mean=w.output.mean * f)))
    return changes


def _of_prfaas(index: int, change: Callable[[PrfaasCluster, float], PrfaasCluster]) -> Change:
    def changed(deployment: Deployment, workload: Workload, factor: float) -> Input:
        clusters = list(deployment.prfaas)
        clusters[index] = change(clusters[index], factor)
        return replace(deployment, prfaas=tuple(clusters)), workload

    return changed


def _of_pd(index: int, change: Callable[[PdCluster, float], PdCluster]) -> Change:
    def changed(deployment: Deployment, workload: Workload, factor: float) -> Input:
        clusters = list(deployment.pd)
        clusters[index] = change(clusters[index], factor)
        return replace(deployment, pd=tuple(clusters)), workload

    return changed


def _slower_prefill(cluster: C, factor: float) -> C:
    profile = replace(cluster.profile, prefill=cluster.profile.prefill.times(factor))
    return replace(cluster, profile=profile)


def _slower_decode(cluster: PdCluster, factor: float) -> PdCluster:
    decode = cluster.profile.decode
    return (
        cluster if decode is None else replace(cluster, profile=replace(cluster.profile, decode=decode.times(factor)))
    )


def _wider(cluster: PrfaasCluster, factor: float) -> PrfaasCluster:
    return replace(cluster, egress_bytes_per_second=cluster.egress_bytes_per_second * factor)


def _wider_link(link: Link, factor: float) -> Link:
    return replace(link, bytes_per_second=link.bytes_per_second * factor)


def _faster(objectives: Objectives, factor: float) -> Objectives:
    return replace(objectives, decode_tokens_per_second=objectives.decode_tokens_per_second * factor)


def _larger(model: Geometry, factor: float) -> Geometry:
    groups = tuple(
        KVGroup(
            group.kind,
            group.num_layers,
            bytes_per_token=round(group.bytes_per_token * factor),
            state_bytes=round(group.state_bytes * factor),
            window_tokens=group.window_tokens,
        )
        for group in model.groups
    )
    return replace(model, groups=groups)


def longer(lengths: Lengths, factor: float) -> Lengths:
    """Every request `factor` times as long, its cached prefix too."""
    if isinstance(lengths, LogNormal):
        shifted = lengths.mu + math.log(factor)
        return replace(lengths, mu=shifted, low=lengths.low * factor, high=lengths.high * factor)
    if isinstance(lengths, Mixture):
        return Mixture(tuple((weight, longer(part, factor)) for weight, part in lengths.parts))
    new, cached, _ = lengths.points(0)
    return Empirical(new * factor, cached * factor)
