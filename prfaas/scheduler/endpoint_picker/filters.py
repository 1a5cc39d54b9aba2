"""llm-d's filters: which endpoints a profile considers."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prfaas.scheduler.endpoint_picker.endpoint import ROLE_LABEL, Endpoint, PickRequest
from prfaas.scheduler.endpoint_picker.parameters import ByLabel, NoParameters, PrefixCacheAffinity, Selector

Filter = Callable[[Sequence[Endpoint], PickRequest, Any], list[Endpoint]]
# An endpoint without the role label decodes, and does nothing else.
_ROLES: dict[str, frozenset[str | None]] = {
    "decode": frozenset({None, "decode", "prefill-decode", "both", "encode-prefill-decode"}),
    "prefill": frozenset({"prefill", "prefill-decode", "both", "encode-prefill", "encode-prefill-decode"}),
    "encode": frozenset({"encode", "encode-prefill", "encode-prefill-decode"}),
}


def by_label(endpoints: Sequence[Endpoint], request: PickRequest, its: ByLabel) -> list[Endpoint]:
    """Return those whose label has one of the values, or that have no such label where that is allowed."""
    return [
        endpoint
        for endpoint in endpoints
        if (its.allowsNoLabel if its.label not in endpoint.labels else endpoint.labels[its.label] in its.validValues)
    ]


def by_selector(endpoints: Sequence[Endpoint], request: PickRequest, its: Selector) -> list[Endpoint]:
    """Return those that a Kubernetes label selector selects; an empty one selects all."""
    wanted = its.matchLabels.items()
    return [
        endpoint
        for endpoint in endpoints
        if all(endpoint.labels.get(key) == value for key, value in wanted)
        and all(_holds(endpoint.labels, expression) for expression in its.matchExpressions)
    ]


def _holds(labels: Mapping[str, str], expression: Mapping[str, Any]) -> bool:
    key, values = expression["key"], expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case _:
            return key not in labels


def by_role(role: str) -> Filter:
    """Return the filter of those that can do a stage: decode, prefill or encode."""

    def keep(endpoints: Sequence[Endpoint], request: PickRequest, its: Any) -> list[Endpoint]:
        return [endpoint for endpoint in endpoints if endpoint.labels.get(ROLE_LABEL) in _ROLES[role]]

    return keep


def prefix_cache_affinity(
    endpoints: Sequence[Endpoint], request: PickRequest, its: PrefixCacheAffinity
) -> list[Endpoint]:
    """Return those that hold most of the prompt, unless the best of them would answer too much later than the best other."""
    total = max(1, request.num_blocks)
    sticky = [endpoint for endpoint in endpoints if (endpoint.num_matched_blocks or 0) / total >= its.affinityThreshold]
    others = [endpoint for endpoint in endpoints if endpoint not in sticky]
    if not sticky or not others:
        return list(endpoints)
    penalty = min(_ttft_seconds(one, its) for one in sticky) - min(_ttft_seconds(other, its) for other in others)
    breaks = its.maxTTFTPenaltyMs > 0 and penalty * 1000 > its.maxTTFTPenaltyMs
    return list(endpoints) if breaks else sticky


def _ttft_seconds(endpoint: Endpoint, its: PrefixCacheAffinity) -> float:
    if its.ttftSource == "latencyPredictor":
        return endpoint.predicted_ttft_seconds or 0.0
    return (endpoint.num_in_flight_tokens or 0) / its.peakPrefillThroughput if its.peakPrefillThroughput else 0.0


def by_session(endpoints: Sequence[Endpoint], request: PickRequest, its: Any) -> list[Endpoint]:
    """Return the session's own endpoint while it is there, all otherwise."""
    own = [endpoint for endpoint in endpoints if endpoint.name == session_endpoint(request)]
    return own or list(endpoints)


def session_endpoint(request: PickRequest) -> str | None:
    """Return the endpoint that a session token names; None for no token and for one that is none."""
    if request.session_token is None:
        return None
    try:
        return b64decode(request.session_token, validate=True).decode()
    except ValueError:
        return None


FILTERS: dict[str, tuple[type[Any], Filter]] = {
    "by-label": (ByLabel, by_label),
    "by-label-selector": (Selector, by_selector),
    "label-selector-filter": (Selector, by_selector),
    "decode-filter": (NoParameters, by_role("decode")),
    "prefill-filter": (NoParameters, by_role("prefill")),
    "encode-filter": (NoParameters, by_role("encode")),
    "prefix-cache-affinity-filter": (PrefixCacheAffinity, prefix_cache_affinity),
    "session-affinity-filter": (NoParameters, by_session),
}
