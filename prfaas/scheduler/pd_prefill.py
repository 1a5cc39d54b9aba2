"""What prefills a request within its PD cluster, once no PrfaaS cluster takes it."""

from __future__ import annotations

from typing import Literal

from prfaas.scheduler.endpoint_picker.adapter import pick_prefill
from prfaas.scheduler.endpoint_picker.picker import PickReason
from prfaas.scheduler.placement import LeaveReason, choose_instance, session_node
from prfaas.scheduler.ppd import LaterTurn, prefills_locally
from prfaas.scheduler.snapshot import InstanceState, OwnPolicy, RequestFacts, Snapshot

PdReason = Literal[
    "short",
    "pd",
    "ppd_first_turn",
    "session_node_full",
    "session_node_slow",
    "session_node_gone",
    "ppd_table_local",
    "ppd_table_pd",
    "static_local",
    "static_pd",
    "suffix_cached",
    "suffix_uncached",
    "prompt_short",
    "no_cache_information",
    "pd_disabled",
    "no_pd_prefill_instance",
]
_STAYS: frozenset[PdReason] = frozenset({"short", "ppd_table_local", "static_local", "suffix_cached"})
_SEEDS = 1 << 32  # requests have one of so many
_LEAVES: dict[LeaveReason, PdReason] = {
    "full": "session_node_full",
    "slow": "session_node_slow",
    "gone": "session_node_gone",
}
_PICKED: dict[PickReason, PdReason] = {
    "disaggregated": "suffix_uncached",
    "always": "pd",
    "suffix_cached": "suffix_cached",
    "prompt_short": "prompt_short",
    "no_cache_information": "no_cache_information",
    "disabled": "pd_disabled",
    "no_decider": "pd_disabled",
    "no_prefill_endpoint": "no_pd_prefill_instance",
}


def choose_pd_prefill(
    snapshot: Snapshot, request: RequestFacts, decode: InstanceState
) -> tuple[InstanceState | None, PdReason]:
    """Return the PD-P instance that prefills the request, or None for the decode instance itself, and why.

    A prompt that was not counted, or of one token, has nothing to hand over and is `short`.
    """
    if not request.counted or request.num_prompt_tokens < 2:
        return None, "short"
    policy = snapshot.local_policy
    if policy == "endpoint_picker":
        picked, why = pick_prefill(snapshot, request, decode)
        return picked, _PICKED[why]
    reason = _wish(policy, snapshot, request, decode)
    if reason in _STAYS:
        return None, reason
    prefill = choose_instance(
        (instance for instance in snapshot.instances if instance.prefills_within(decode.cluster)), request
    )
    return (prefill, reason) if prefill is not None else (None, "no_pd_prefill_instance")


def _wish(policy: OwnPolicy, snapshot: Snapshot, request: RequestFacts, decode: InstanceState) -> PdReason:
    """What the policy wants, whoever is there."""
    match policy:
        case "decode":
            return "short"
        case "pd":
            return "pd"
        case "suffix":
            uncached = request.uncached_at(decode.agent)
            return "suffix_uncached" if uncached >= snapshot.non_cached_tokens else "suffix_cached"
        case "static":
            return _static(snapshot, request, decode)
        case "ppd":
            return _ppd(snapshot, request, decode)


def later_turn(request: RequestFacts, decode: InstanceState) -> LaterTurn:
    """Return a request as PPD's table sees it, on the decode instance that was chosen for it."""
    cached = request.cached_at(decode.agent)
    return LaterTurn(request.num_prompt_tokens - cached, cached, request.max_output_tokens)


def stays_on_session_node(snapshot: Snapshot, request: RequestFacts) -> bool:
    """Whether it is decoded on its conversation's node whatever work is ahead there: a later turn under PPD's policies."""
    return snapshot.local_policy in ("ppd", "static") and request.turn != 1 and request.session_agent is not None


def _opening(snapshot: Snapshot, request: RequestFacts, decode: InstanceState) -> PdReason | None:
    """Why it is prefilled as a conversation's first turn is; None: it is a later one whose KV is on the decode node."""
    if stays_on_session_node(snapshot, request):
        own = session_node((instance for instance in snapshot.instances if instance.decodes), request)
        if not isinstance(own, list):
            return _LEAVES[own]
    return "ppd_first_turn" if request.turn == 1 or not request.cached_at(decode.agent) else None


def _static(snapshot: Snapshot, request: RequestFacts, decode: InstanceState) -> PdReason:
    """PPD's static x over P, D and R: an instance of role `both` is a replica (R), which prefills all that it decodes; of
    the later turns on instances that decode alone (D) a share x stays, that of the last of these by name first.
    """
    if decode.role == "both":
        return "static_local"
    if opening := _opening(snapshot, request, decode):
        return opening
    its = (
        instance for instance in snapshot.instances if instance.cluster == decode.cluster and instance.role == "decode"
    )
    names = sorted(one.instance for one in its)
    share = snapshot.local_turns_ratio * len(names) - (len(names) - 1 - names.index(decode.instance))
    return "static_local" if request.seed < share * _SEEDS else "static_pd"


def _ppd(snapshot: Snapshot, request: RequestFacts, decode: InstanceState) -> PdReason:
    """PPD's decision. A turn whose KV is no longer on the decode node counts as a first one."""
    if opening := _opening(snapshot, request, decode):
        return opening
    if snapshot.ppd_table is None:
        return "ppd_first_turn"
    qps, mode = snapshot.requests_per_second, snapshot.ppd_mode
    local = prefills_locally(snapshot.ppd_table, later_turn(request, decode), qps=qps, mode=mode)
    return "ppd_table_local" if local else "ppd_table_pd"
