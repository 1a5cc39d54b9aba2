"""Choice of the instance that prefills a request within its PD cluster, once no PrfaaS cluster takes it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from prfaas.scheduler.endpoint_picker.adapter import pick_prefill
from prfaas.scheduler.endpoint_picker.picker import PickReason
from prfaas.scheduler.placement import LeaveReason, choose_instance, session_node
from prfaas.scheduler.ppd import LaterTurn, prefills_locally
from prfaas.scheduler.snapshot import InstanceState, RequestFacts, Snapshot
from prfaas.types import OwnPolicy

PdReason = (
    Literal["short", "ppd_first_turn", "ppd_table_local", "ppd_table_pd", "static_local", "static_pd"]
    | LeaveReason
    | PickReason
)
PD_EXPLANATIONS: dict[PdReason, str] = {
    "short": "its uncached tokens do not exceed the threshold, so the decode instance prefills it",
    "pd": "the policy lets a PD-P instance prefill every request of this cluster",
    "ppd_first_turn": "first turn of a session, or its decode node holds nothing of it: a PD-P instance prefills it",
    "session_node_full": "later turn, but the session's node has hardly a free KV block: a PD-P instance prefills it for "
    "another node",
    "session_node_slow": "later turn, but the session's node has far more requests than another node: a PD-P instance prefills "
    "it for that node",
    "session_node_gone": "later turn, but the session's node is not available: a PD-P instance prefills it for another node",
    "ppd_table_local": "later turn with its KV on the decode node, and PPD's table lets that node prefill it",
    "ppd_table_pd": "later turn with its KV on the decode node, but PPD's table lets a PD-P instance prefill it",
    "static_local": "its decode instance prefills everything, or it is in the share of later turns that such instances prefill",
    "static_pd": "later turn with its KV on the decode node, but outside the share that decode instances prefill",
    "suffix_cached": "fewer uncached tokens on the decode node than the decider's limit, so that node prefills it",
    "suffix_uncached": "at least as many uncached tokens on the decode node as the decider's limit: a PD-P instance prefills",
    "prompt_short": "the prompt is shorter than the decider's limit, so the decode instance prefills it",
    "no_cache_information": "the decider needs the uncached tokens, which are unknown, so the decode instance prefills it",
    "pd_disabled": "the endpoint picker's configuration disables separate prefill",
    "no_pd_prefill_instance": "a PD-P instance should prefill it, but none is healthy, so the decode instance does",
}
_LOCAL: frozenset[PdReason] = frozenset({"short", "ppd_table_local", "static_local"})
NUM_SEEDS = 1 << 32
# Side of PPD's table by the reason of a decision.
WAS_LOCAL: Mapping[str, bool] = MappingProxyType({"ppd_table_local": True, "ppd_table_pd": False})


def choose_pd_prefill(
    snapshot: Snapshot, request: RequestFacts, decode: InstanceState
) -> tuple[InstanceState | None, PdReason]:
    """Return the PD-P instance that prefills the request, or None for the decode instance itself, and the reason.

    A prompt that was not counted, or of one token, has nothing to hand over and is `short`.
    """
    if not request.counted or request.num_prompt_tokens < 2:
        return None, "short"
    policy = snapshot.local_policy
    if policy == "endpoint_picker":
        return pick_prefill(snapshot, request, decode)
    reason = _preference(policy, snapshot, request, decode)
    if reason in _LOCAL:
        return None, reason
    candidates = (instance for instance in snapshot.instances if instance.prefills_within(decode.cluster))
    prefill = choose_instance(candidates, request)
    return (prefill, reason) if prefill is not None else (None, "no_pd_prefill_instance")


def _preference(policy: OwnPolicy, snapshot: Snapshot, request: RequestFacts, decode: InstanceState) -> PdReason:
    """Return the policy's preference, regardless of which instances are available."""
    match policy:
        case "decode":
            return "short"
        case "pd":
            return "pd"
        case "static":
            return _static(snapshot, request, decode)
        case "ppd":
            return _ppd(snapshot, request, decode)


def later_turn(request: RequestFacts, decode: InstanceState) -> LaterTurn:
    """Return the request in the form of PPD's table, for the decode instance chosen for it."""
    cached = request.cached_at(decode.agent)
    return LaterTurn(request.num_prompt_tokens - cached, cached, request.max_output_tokens)


def stays_on_session_node(snapshot: Snapshot, request: RequestFacts) -> bool:
    """Return whether the session's node decodes the request whatever its load, as PPD's policies demand of later turns."""
    return snapshot.local_policy in ("ppd", "static") and request.turn != 1 and request.session_agent is not None


def _first_turn_reason(snapshot: Snapshot, request: RequestFacts, decode: InstanceState) -> PdReason | None:
    """Return the reason to treat the request as a first turn; None for a later turn with its KV on the decode node."""
    if stays_on_session_node(snapshot, request):
        own = session_node((instance for instance in snapshot.instances if instance.decodes), request)
        if not isinstance(own, list):
            return own
    return "ppd_first_turn" if request.turn == 1 or not request.cached_at(decode.agent) else None


def _static(snapshot: Snapshot, request: RequestFacts, decode: InstanceState) -> PdReason:
    """Return PPD's static split x over P, D and R.

    An instance of role `both` is a replica (R) and prefills everything that it decodes. Instances that only decode (D)
    prefill the share x of their later turns. The last D by name reaches its full share first.
    """
    if decode.role == "both":
        return "static_local"
    if reason := _first_turn_reason(snapshot, request, decode):
        return reason
    names = sorted(
        instance.instance
        for instance in snapshot.instances
        if instance.cluster == decode.cluster and instance.role == "decode"
    )
    share = snapshot.local_turns_ratio * len(names) - (len(names) - 1 - names.index(decode.instance))
    return "static_local" if request.seed < share * NUM_SEEDS else "static_pd"


def _ppd(snapshot: Snapshot, request: RequestFacts, decode: InstanceState) -> PdReason:
    """Return PPD's decision. A turn without KV on the decode node counts as a first turn."""
    if reason := _first_turn_reason(snapshot, request, decode):
        return reason
    if snapshot.ppd_table is None:
        return "ppd_first_turn"
    local = prefills_locally(snapshot.ppd_table, later_turn(request, decode), qps=snapshot.requests_per_second)
    return "ppd_table_local" if local else "ppd_table_pd"
