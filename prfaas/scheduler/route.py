"""Whether a prefix is fetched from another node before it is extended: PrfaaS, section 3.4.2, abundant bandwidth (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prfaas.scheduler.endpoint_picker.adapter import pick_decode
from prfaas.scheduler.pd_prefill import PdReason, choose_pd_prefill, stays_on_session_node
from prfaas.scheduler.placement import choose_instance, session_node
from prfaas.scheduler.snapshot import InstanceState, RequestFacts, Snapshot
from prfaas.scheduler.threshold import prefill_site
from prfaas.types import AgentName, InstanceId


@dataclass(frozen=True)
class PrefixFetch:
    """Copy the first `num_tokens` tokens of the prompt, which `source` holds and `destination` does not."""

    source: AgentName
    destination: AgentName
    num_tokens: int


def find_fetch(snapshot: Snapshot, request: RequestFacts, site: InstanceState) -> PrefixFetch | None:
    """Return the longest prefix that another node holds, where it is worth bringing to the instance that computes the rest.

    It is when it spares at least `fetch_tokens` tokens, and comes from the same cluster or over a link that is up and
    abundant. Among nodes that hold as much: one of the same cluster, then the first by name.
    """
    clusters = {instance.agent: instance.cluster for instance in snapshot.instances}
    best: PrefixFetch | None = None
    best_rank = (0, False, "")
    for source, num_tokens in request.cached_tokens.items():
        gain = num_tokens - request.cached_at(site.agent)
        if not snapshot.fetch_tokens or gain < snapshot.fetch_tokens or source not in clusters:
            continue
        link = (clusters[source], site.cluster)
        is_near = link[0] == link[1]
        if not is_near and (link in snapshot.links_down or not snapshot.path(*link).is_abundant):
            continue
        rank = (-num_tokens, not is_near, source)
        if best is None or rank < best_rank:
            best, best_rank = PrefixFetch(source, site.agent, num_tokens), rank
    return best


Route = Literal["local", "remote", "refused"]
PrfaasReason = Literal["long", "cached_elsewhere"]
StayReason = Literal["no_prefill_instance", "link_down", "link_too_slow", "congested"]
Reason = PrfaasReason | StayReason | PdReason | Literal["fetched", "not_transferable", "no_decode_instance"]
NO_LAYOUT = "no node has registered a layout of its model, so nothing counted as cached"
EXPLANATIONS: dict[Reason, str] = {
    "short": "its uncached tokens do not exceed the threshold, so the decode instance prefills it",
    "long": "its uncached tokens exceed the threshold, so a PrfaaS cluster prefills it and its KV is streamed here",
    "cached_elsewhere": "a PrfaaS cluster holds a prefix that this cluster lacks and the link has room, so the short rest "
    "is computed there and all of it is streamed here",
    "fetched": "a PrfaaS cluster holds a longer prefix and the link has room, so that prefix is fetched and the short rest is "
    "computed where it is decoded",
    "not_transferable": "its KV cannot be named by one list of token ids, so it stays where it is decoded",
    "no_prefill_instance": "it is long, but no healthy instance of a PrfaaS cluster is there",
    "link_down": "it is long, but no link from a PrfaaS cluster to the decode cluster is up",
    "link_too_slow": "it is long, but its KV would take longer over the link than prefilling it here",
    "congested": "it exceeds the threshold, but not the one that is in force while the link is congested",
    "no_decode_instance": "no healthy instance can decode",
    "pd": "the policy prefills every request of this cluster on a PD-P instance",
    "ppd_first_turn": "it opens its conversation, or the decode node has nothing of it: a PD-P instance prefills it",
    "session_node_full": "a later turn, but its conversation's node has hardly a KV block left: a PD-P instance prefills it "
    "for another node",
    "session_node_slow": "a later turn, but its conversation's node has far more requests than another: a PD-P instance "
    "prefills it for that one",
    "session_node_gone": "a later turn, but its conversation's node cannot be asked: a PD-P instance prefills it for another",
    "ppd_table_local": "a later turn whose KV is on the decode node, and PPD's table has it prefilled there",
    "ppd_table_pd": "a later turn whose KV is on the decode node, but PPD's table has a PD-P instance prefill it",
    "static_local": "its decode instance prefills all, or it is one of the share of later turns that such instances keep",
    "static_pd": "a later turn whose KV is on the decode node, but not of the share that decode instances prefill",
    "suffix_cached": "fewer of its tokens than the decider's limit are uncached on the decode node, so it prefills them",
    "suffix_uncached": "the decode node lacks at least as many of its tokens as the decider's limit: a PD-P instance prefills",
    "prompt_short": "the whole prompt is shorter than the decider's limit, so the decode instance prefills it",
    "no_cache_information": "the decider counts what is uncached, which nobody knows, so the decode instance prefills it",
    "pd_disabled": "the endpoint picker's configuration has no request prefilled apart",
    "no_pd_prefill_instance": "a PD-P instance should prefill it, but none is healthy, so the decode instance does, "
    "or it is refused where so set",
}

NOBODY_PREFILLS: frozenset[Reason] = frozenset({"no_prefill_instance", "no_pd_prefill_instance"})


@dataclass(frozen=True)
class Decision:
    """Where a request goes, and why. A `remote` one is prefilled by `prefill` and its KV travels to `decode`.

    `fetch` comes first: whoever computes extends what it brings.
    """

    route: Route
    reason: Reason
    decode: InstanceId | None = None
    prefill: InstanceId | None = None
    fetch: PrefixFetch | None = None


def explain(decision: Decision, facts: RequestFacts) -> str:
    """Why, in words."""
    words = EXPLANATIONS[decision.reason]
    return words if facts.caches_known else f"{words}; {NO_LAYOUT}"


def route(snapshot: Snapshot, request: RequestFacts) -> Decision:
    """Return the decision for one request."""
    decode = _decode(snapshot, request)
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
    stays = Decision("local", offload if offload and reason == "short" else reason, decode.instance)
    if snapshot.without_prefill == "refuse" and stays.reason in NOBODY_PREFILLS:
        return Decision("refused", stays.reason)
    return stays


def _decode(snapshot: Snapshot, request: RequestFacts) -> InstanceState | None:
    if snapshot.local_policy == "endpoint_picker":
        return pick_decode(snapshot, request)
    candidates = [instance for instance in snapshot.instances if instance.decodes]
    own = session_node(candidates, request) if stays_on_session_node(snapshot, request) else []
    return choose_instance(own if isinstance(own, list) and own else candidates, request)


def _offload(snapshot: Snapshot, request: RequestFacts, decode: InstanceState) -> Decision | StayReason | None:
    """Return the decision to offload to a PrfaaS cluster; or why a request above t stays; or None for one below it."""
    uncached = request.uncached_at(decode.agent)
    if not request.counted or request.num_prompt_tokens < 2 or uncached <= _lowest_threshold(snapshot, decode):
        return None  # of one token nothing can be transferred
    candidates = [
        instance
        for instance in snapshot.instances
        if instance.prefills_for_others and instance.instance not in request.excluded
    ]
    reachable = [
        candidate for candidate in candidates if (candidate.cluster, decode.cluster) not in snapshot.links_down
    ]
    if reachable:
        return _over_a_path(snapshot, request, decode, reachable)
    if uncached <= snapshot.threshold_tokens:
        return None
    return "link_down" if candidates else "no_prefill_instance"


def _lowest_threshold(snapshot: Snapshot, decode: InstanceState) -> int:
    paths = (path.threshold_tokens for path in snapshot.paths if path.destination == decode.cluster)
    return min((snapshot.threshold_tokens, *paths))


def _over_a_path(
    snapshot: Snapshot, request: RequestFacts, decode: InstanceState, reachable: Sequence[InstanceState]
) -> Decision | StayReason | None:
    """Return the offload over the first path that takes it, in the order in which `choose` likes the instances."""
    refusals: list[StayReason | None] = []
    left = list(reachable)
    while left:
        prefill = choose_instance(left, request)
        assert prefill is not None, "excluded and dead instances were left out before"
        verdict = _verdict(snapshot, request, decode, prefill)
        if verdict == "long" or verdict == "cached_elsewhere":
            fetch = find_fetch(snapshot, request, prefill)
            return Decision("remote", verdict, decode.instance, prefill.instance, fetch)
        if verdict == "fetched":
            return Decision("local", verdict, decode.instance, fetch=find_fetch(snapshot, request, decode))
        refusals.append(verdict)
        left = [one for one in left if one.cluster != prefill.cluster]
    return refusals[0]


def _verdict(
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
