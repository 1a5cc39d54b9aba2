"""Route of one request: `Snapshot + RequestFacts → Decision(reason)`, a pure function.

The policies apply in this order:

0. A plan with routes by length and tenant leaves only the clusters of one route (`planned_routes.py`).
1. The decode instance is chosen by usable prefix, session and load.
2. A request with more uncached tokens than t goes to a PrfaaS cluster for prefill, if the transfer pays.
3. The PD cluster's policy prefills the rest (`pd_prefill.py`): the decode instance, a PD-P instance, or PPD's table decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from prfaas.scheduler.endpoint_picker.adapter import pick_decode
from prfaas.scheduler.pd_prefill import PD_EXPLANATIONS, PdReason, choose_pd_prefill, stays_on_session_node
from prfaas.scheduler.placement import choose_instance, session_node
from prfaas.scheduler.planned_routes import within_planned_route
from prfaas.scheduler.snapshot import InstanceState, RequestFacts, Snapshot
from prfaas.scheduler.threshold import prefill_site
from prfaas.types import AgentName, InstanceId

# Remote: another instance prefills, in a PrfaaS cluster or as a PD-P instance of the same cluster.
Route = Literal["local", "remote", "refused"]
# Reasons for a remote route to a PrfaaS cluster. `pd_prefill.py` has those for a PD-P instance of the same cluster.
PrfaasReason = Literal["long", "cached_elsewhere"]
# Reasons why a long prompt stays in the PD cluster.
StayReason = Literal["no_prefill_instance", "link_down", "link_too_slow", "congested"]
Reason = PrfaasReason | StayReason | PdReason | Literal["fetched", "not_transferable", "no_decode_instance"]
NO_LAYOUT = "no node has registered a layout of its model, so nothing counted as cached"
EXPLANATIONS = dict[Reason, str](PD_EXPLANATIONS.items()) | {
    "long": "its uncached tokens exceed the threshold, so a PrfaaS cluster prefills it and streams its KV",
    "cached_elsewhere": "a PrfaaS cluster holds a longer prefix and the path has room, so it computes the short rest there and "
    "streams all KV",
    "fetched": "a PrfaaS cluster holds a longer prefix and the path has room, so the decode node fetches that prefix and "
    "computes the short rest",
    "not_transferable": "one list of token ids cannot name its KV, so the decode instance prefills it",
    "no_prefill_instance": "it is long, but no PrfaaS cluster has a healthy instance",
    "link_down": "it is long, but no link from a PrfaaS cluster to the decode cluster is up",
    "link_too_slow": "it is long, but transferring its KV would take longer than prefilling it locally",
    "congested": "it exceeds the deployment's threshold, but not the one in force while the path is congested",
    "no_decode_instance": "no healthy instance can decode, or none in the clusters of its tenant",
}


@dataclass(frozen=True)
class PrefixFetch:
    """Copy of the first `num_tokens` tokens of the prompt from a node that holds them to one that does not."""

    source: AgentName
    destination: AgentName
    num_tokens: int


@dataclass(frozen=True)
class Decision:
    """Route of a request, and the reason. On a remote route `prefill` computes the KV and sends it to `decode`.

    A `fetch` comes first: the instance that prefills extends the fetched prefix.
    """

    route: Route
    reason: Reason
    decode: InstanceId | None = None
    prefill: InstanceId | None = None
    fetch: PrefixFetch | None = None


def explain(decision: Decision, facts: RequestFacts) -> str:
    """Return the reason in words."""
    words = EXPLANATIONS[decision.reason]
    return words if facts.caches_known else f"{words}; {NO_LAYOUT}"


def route(snapshot: Snapshot, request: RequestFacts) -> Decision:
    """Return the decision for one request."""
    if request.clusters:
        allowed = [instance for instance in snapshot.instances if instance.cluster in request.clusters]
        snapshot = replace(snapshot, instances=tuple(allowed))
    snapshot = within_planned_route(snapshot, request)
    decode = _choose_decode(snapshot, request)
    if decode is None:
        return Decision("refused", "no_decode_instance")
    if request.obstacle is not None:
        return Decision("local", "not_transferable", decode.instance)
    offload = _offload(snapshot, request, decode)
    if isinstance(offload, Decision):
        return offload
    prefill, reason = choose_pd_prefill(snapshot, request, decode)
    if prefill is not None:
        return Decision("remote", reason, decode.instance, prefill.instance)
    return Decision("local", offload if offload and reason == "short" else reason, decode.instance)


def _choose_decode(snapshot: Snapshot, request: RequestFacts) -> InstanceState | None:
    if snapshot.local_policy == "endpoint_picker":
        return pick_decode(snapshot, request)
    candidates = [instance for instance in snapshot.instances if instance.decodes]
    own = session_node(candidates, request) if stays_on_session_node(snapshot, request) else []
    return choose_instance(own if isinstance(own, list) and own else candidates, request)


def _offload(snapshot: Snapshot, request: RequestFacts, decode: InstanceState) -> Decision | StayReason | None:
    """Return the decision to offload, the reason why a request above t stays, or None for a request below t.

    A prompt of one token leaves nothing to transfer.
    """
    uncached = request.uncached_at(decode.agent)
    if not request.counted or request.num_prompt_tokens < 2 or uncached <= _lowest_threshold(snapshot, decode):
        return None
    candidates = [
        instance
        for instance in snapshot.instances
        if instance.prefills_for_others and instance.instance not in request.excluded
    ]
    reachable = [
        candidate for candidate in candidates if (candidate.cluster, decode.cluster) not in snapshot.links_down
    ]
    if reachable:
        return _offload_over_path(snapshot, request, decode, reachable)
    if uncached <= snapshot.threshold_tokens:
        return None
    return "link_down" if candidates else "no_prefill_instance"


def _lowest_threshold(snapshot: Snapshot, decode: InstanceState) -> int:
    paths = (path.threshold_tokens for path in snapshot.paths if path.destination == decode.cluster)
    return min((snapshot.threshold_tokens, *paths))


def _offload_over_path(
    snapshot: Snapshot, request: RequestFacts, decode: InstanceState, reachable: Sequence[InstanceState]
) -> Decision | StayReason | None:
    """Return the offload over the first path that takes it, in the order in which `choose_instance` ranks the instances."""
    refusals: list[StayReason | None] = []
    left = list(reachable)
    while left:
        prefill = choose_instance(left, request)
        assert prefill is not None, "the caller leaves out excluded and unhealthy instances"
        verdict = _path_verdict(snapshot, request, decode, prefill)
        if verdict == "long" or verdict == "cached_elsewhere":
            fetch = find_fetch(snapshot, request, prefill)
            return Decision("remote", verdict, decode.instance, prefill.instance, fetch)
        if verdict == "fetched":
            return Decision("local", verdict, decode.instance, fetch=find_fetch(snapshot, request, decode))
        refusals.append(verdict)
        left = [instance for instance in left if instance.cluster != prefill.cluster]
    return refusals[0]


def _path_verdict(
    snapshot: Snapshot, request: RequestFacts, decode: InstanceState, prefill: InstanceState
) -> PrfaasReason | StayReason | Literal["fetched"] | None:
    path = snapshot.path(prefill.cluster, decode.cluster)
    site = prefill_site(
        total_tokens=request.num_prompt_tokens,
        pd_cached_tokens=request.cached_at(decode.agent),
        prfaas_cached_tokens=request.cached_at(prefill.agent),
        threshold_tokens=path.threshold_tokens,
        abundant=path.is_abundant,
    )
    uncached = request.uncached_at(decode.agent)
    if site == "pd":
        return "congested" if uncached > snapshot.threshold_tokens else None
    if site == "prfaas_holds" and find_fetch(snapshot, request, decode) is not None:
        return "fetched"
    if path.cost is not None and not path.cost.pays(uncached):
        return "link_too_slow"
    return "long" if site == "prfaas" else "cached_elsewhere"


def find_fetch(snapshot: Snapshot, request: RequestFacts, instance: InstanceState) -> PrefixFetch | None:
    """Return the longest prefix worth fetching to the instance that computes the rest: PrfaaS, section 3.4.2.

    A fetch must save at least `fetch_tokens` tokens, and come from the same cluster or over a working, abundant path.
    Among equally long prefixes the same cluster wins, then the first node by name.
    """
    clusters = {instance.agent: instance.cluster for instance in snapshot.instances}
    best: PrefixFetch | None = None
    best_rank = (0, False, "")
    for source, num_tokens in request.cached_tokens.items():
        gain = num_tokens - request.cached_at(instance.agent)
        if not snapshot.fetch_tokens or gain < snapshot.fetch_tokens or source not in clusters:
            continue
        path = (clusters[source], instance.cluster)
        is_near = path[0] == path[1]
        if not is_near and (path in snapshot.links_down or not snapshot.path(*path).is_abundant):
            continue
        rank = (-num_tokens, not is_near, source)
        if best is None or rank < best_rank:
            best, best_rank = PrefixFetch(source, instance.agent, num_tokens), rank
    return best
