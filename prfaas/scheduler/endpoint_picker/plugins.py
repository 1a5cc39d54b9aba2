"""What llm-d's plugins see of an endpoint and of a request."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prfaas.scheduler.endpoint_picker.parameters import (
    ActiveRequests,
    ByLabel,
    LoadAware,
    NoHitLru,
    NoParameters,
    PrecisePrefixCache,
    PrefixCacheAffinity,
    PrefixCacheScoring,
    Selector,
    TokenLoad,
)

ROLE_LABEL = "llm-d.ai/role"


@dataclass(frozen=True)
class Endpoint:
    """One model server. None stands for figures that nobody has measured."""

    name: str  # namespace/name, as session tokens carry it
    labels: Mapping[str, str] = field(default_factory=dict)
    num_waiting: int = 0
    num_running: int = 0
    kv_usage_ratio: float = 0.0
    num_matched_blocks: int | None = None  # of this request's prompt
    num_in_flight: int | None = None  # requests that the picker sent there and that have not ended
    num_in_flight_tokens: int | None = None
    last_cold_use: float | None = None  # when it last took a request that nobody had cached; only the order counts
    # What nobody measures here, as `config.py` warns; llm-d's own cases state it:
    predicted_ttft_seconds: float | None = None
    active_adapters: frozenset[str] = frozenset()
    waiting_adapters: frozenset[str] = frozenset()
    max_adapters: int = 0


@dataclass(frozen=True)
class PickRequest:
    """What of a request the plugins read."""

    num_tokens: int = 0
    block_tokens: int = 1  # of the blocks that `num_matched_blocks` counts
    adapter: str = ""
    session_token: str | None = None  # x-session-token: base64 of an endpoint's name

    @property
    def num_blocks(self) -> int:
        """Return the prompt's full blocks."""
        return self.num_tokens // self.block_tokens

    def cached_tokens(self, endpoint: Endpoint) -> int:
        """What of the prompt an endpoint holds; nothing where that is not known."""
        return (endpoint.num_matched_blocks or 0) * self.block_tokens


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


Scorer = Callable[[Sequence[Endpoint], PickRequest, Any], list[float]]


def load_aware(endpoints: Sequence[Endpoint], request: PickRequest, its: LoadAware) -> list[float]:
    """0.5 · (1 − min(q, t)/t) for q waiting requests: an empty queue alone is worth half."""
    return [0.5 * (1 - min(endpoint.num_waiting, its.threshold) / its.threshold) for endpoint in endpoints]


def queue(endpoints: Sequence[Endpoint], request: PickRequest, its: NoParameters) -> list[float]:
    """Fewest waiting 1, most 0."""
    return _spread([endpoint.num_waiting for endpoint in endpoints])


def running(endpoints: Sequence[Endpoint], request: PickRequest, its: NoParameters) -> list[float]:
    """Fewest running 1, most 0."""
    return _spread([endpoint.num_running for endpoint in endpoints])


def _spread(values: Sequence[int]) -> list[float]:
    lowest, highest = min(values, default=0), max(values, default=0)
    return [(highest - value) / (highest - lowest) if highest > lowest else 1.0 for value in values]


def kv_cache(endpoints: Sequence[Endpoint], request: PickRequest, its: NoParameters) -> list[float]:
    """Return the share of KV space that is free."""
    return [1 - endpoint.kv_usage_ratio for endpoint in endpoints]


def prefix_cache(endpoints: Sequence[Endpoint], request: PickRequest, its: PrefixCacheScoring) -> list[float]:
    """w · min(1, m·b/s)² + (1 − w) · m/n for m matched of n blocks of b tokens, scale s and weight w of the length."""
    weight, total = its.matchLengthWeight, max(1, request.num_blocks)
    lengths = [min(1.0, request.cached_tokens(endpoint) / its.matchLengthScaleTokens) for endpoint in endpoints]
    shares = [(endpoint.num_matched_blocks or 0) / total for endpoint in endpoints]
    return [weight * length**2 + (1 - weight) * share for length, share in zip(lengths, shares, strict=True)]


def precise_prefix_cache(endpoints: Sequence[Endpoint], request: PickRequest, its: PrecisePrefixCache) -> list[float]:
    """As `prefix_cache` without parameters."""
    return prefix_cache(endpoints, request, PrefixCacheScoring())


def active_requests(endpoints: Sequence[Endpoint], request: PickRequest, its: ActiveRequests) -> list[float]:
    """1 for an idle endpoint, (max − x)/max · maxBusyScore for a busy one."""
    counts = [endpoint.num_in_flight or 0 for endpoint in endpoints]
    highest = max(counts, default=0)
    return [1.0 if count <= its.idleThreshold else (highest - count) / highest * its.maxBusyScore for count in counts]


def token_load(endpoints: Sequence[Endpoint], request: PickRequest, its: TokenLoad) -> list[float]:
    """1 − min(load, t)/t, where load is what is in flight and what of this request the endpoint lacks.

    An endpoint without figures counts as empty.
    """
    return [
        1 - min(_load(endpoint, request), its.queueThresholdTokens) / its.queueThresholdTokens for endpoint in endpoints
    ]


def _load(endpoint: Endpoint, request: PickRequest) -> int:
    if endpoint.num_in_flight_tokens is None:
        return 0
    return endpoint.num_in_flight_tokens + max(0, request.num_tokens - request.cached_tokens(endpoint))


def no_hit_lru(endpoints: Sequence[Endpoint], request: PickRequest, its: NoHitLru) -> list[float]:
    """For a request that nobody has cached: the longest without such a request 1, the last one that took one 0."""
    if len(endpoints) < 2 or any(endpoint.num_matched_blocks for endpoint in endpoints):
        return [0.5] * len(endpoints)
    never = float("-inf")
    times = [never if endpoint.last_cold_use is None else endpoint.last_cold_use for endpoint in endpoints]
    order = sorted(range(len(endpoints)), key=lambda position: times[position])
    return [1 - order.index(position) / (len(endpoints) - 1) for position in range(len(endpoints))]


def session_affinity(endpoints: Sequence[Endpoint], request: PickRequest, its: NoParameters) -> list[float]:
    """1 for the endpoint that the session token names."""
    own = session_endpoint(request)
    return [float(endpoint.name == own) for endpoint in endpoints]


def lora_affinity(endpoints: Sequence[Endpoint], request: PickRequest, its: NoParameters) -> list[float]:
    """1 where the adapter is active, 0.8 where a place is free, 0.6 where it waits to be loaded, else 0."""
    return [_lora(endpoint, request.adapter) for endpoint in endpoints]


def _lora(endpoint: Endpoint, adapter: str) -> float:
    if adapter in endpoint.active_adapters:
        return 1.0
    if len(endpoint.active_adapters) + len(endpoint.waiting_adapters) < endpoint.max_adapters:
        return 0.8
    return 0.6 if adapter in endpoint.waiting_adapters else 0.0


SCORERS: dict[str, tuple[type[Any], Scorer]] = {
    "load-aware-scorer": (LoadAware, load_aware),
    "queue-scorer": (NoParameters, queue),
    "running-requests-size-scorer": (NoParameters, running),
    "kv-cache-utilization-scorer": (NoParameters, kv_cache),
    "prefix-cache-scorer": (PrefixCacheScoring, prefix_cache),
    "precise-prefix-cache-scorer": (PrecisePrefixCache, precise_prefix_cache),
    "active-request-scorer": (ActiveRequests, active_requests),
    "token-load-scorer": (TokenLoad, token_load),
    "no-hit-lru-scorer": (NoHitLru, no_hit_lru),
    "session-affinity-scorer": (NoParameters, session_affinity),
    "lora-affinity-scorer": (NoParameters, lora_affinity),
}
