"""Where an answer rests on more than its inputs: inferred parts, prolonged profiles, fits, assumptions."""

from __future__ import annotations

from prfaas.model.capacity.loads import LoadModel
from prfaas.model.cost.curve import ONE, OfNewTokens
from prfaas.model.cost.lengths import expectation
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment, PdCluster, PrfaasCluster
from prfaas.model.planning.plan import Plan


def inferred_inputs(deployment: Deployment, workload: Workload) -> tuple[str, ...]:
    """Return every input that was not measured or published, each once."""
    profiles = [part for cluster in deployment.clusters for part in cluster.profile.inferred]
    return tuple(dict.fromkeys([*deployment.model.inferred, *profiles, *workload.inferred]))


def notes(deployment: Deployment, workload: Workload, plan: Plan, loads: LoadModel) -> tuple[str, ...]:
    """What a reader of this plan should know."""
    clusters = deployment.clusters
    found = [_range_note(cluster, workload) for cluster in clusters] + [_fit_note(cluster) for cluster in clusters]
    found += [_intra_note(deployment, workload, plan), *_batch_notes(deployment, loads)]
    if len(deployment.pd) > 1:
        found.append(
            "with several PD clusters the splits are rounded from the program and improved one instance at a time"
        )
    return tuple(dict.fromkeys(note for note in found if note))


def _range_note(cluster: PrfaasCluster | PdCluster, workload: Workload) -> str:
    profile = cluster.profile.prefill
    mass = workload.prefilled.cumulative(ONE)
    top = workload.prefilled.support[1]
    below, above = mass(profile.min_tokens - 1), mass(top) - mass(profile.max_tokens)
    if below + above < 1e-9:
        return ""
    return (
        f"{cluster.profile.name}: measured from {profile.min_tokens:.0f} to {profile.max_tokens:.0f} tokens; prolonged for"
        f" {below:.2%} of the requests, which are shorter, and {above:.2%}, which are longer"
    )


def _fit_note(cluster: PrfaasCluster | PdCluster) -> str:
    error = cluster.profile.fit_error
    return f"{cluster.profile.name}: the fitted prefill curve misses a point by {error:.1%}" if error > 0.005 else ""


def _intra_note(deployment: Deployment, workload: Workload, plan: Plan) -> str:
    if any(cluster.intra_bytes_per_second is not None for cluster in deployment.pd) or not plan.num_prefill:
        return ""
    each = plan.local_bytes_per_second / plan.num_prefill
    mean = expectation(workload.prefilled, OfNewTokens(deployment.model.curve())) / expectation(workload.prefilled, ONE)
    return (
        "equation (4) takes the network inside a PD cluster for no limit: that holds while each prefill instance can send"
        f" {each * 8 / 1e9:.1f} Gbps (an average request is {mean / 2**20:.0f} MiB); set intra_bandwidth to plan with less"
    )


def _batch_notes(deployment: Deployment, loads: LoadModel) -> list[str]:
    reasons = {"memory": "its KV memory", "profile": "the largest measured batch"}
    return [
        f"{cluster.name}: a decode batch of {capacity.max_batch} is bounded by {reasons[capacity.limit]}, not by the objective"
        for cluster, capacity in zip(deployment.pd, loads.decode, strict=True)
        if capacity.limit != "slo"
    ]
