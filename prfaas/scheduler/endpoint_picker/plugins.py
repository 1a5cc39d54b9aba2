"""llm-d's filters and scorers, and the endpoints and requests that they see."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prfaas.scheduler.endpoint_picker.parameters import (
    ActiveRequests,
    ByLabel,
    LabelExpression,
    LoadAware,
    NoParameters,
    PrefixCacheAffinity,
    PrefixCacheScoring,
    Selector,
    TokenLoad,
)

ROLE_LABEL = "llm-d.ai/role"
# An endpoint without the role label only decodes.
_ROLES: dict[str, frozenset[str | None]] = {
    "decode": frozenset({None, "decode", "prefill-decode", "both", "encode-prefill-decode"}),
    "prefill": frozenset({"prefill", "prefill-decode", "both", "encode-prefill", "encode-prefill-decode"}),
}


@dataclass(frozen=True)
class Endpoint:
    """One model server. None marks a figure that was not measured.

    `num_cached_tokens` is the part of the present prompt that it holds. `num_in_flight` counts the picker's own unfinished
    requests. Only the order of `last_cold_use` counts.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    num_waiting: int = 0
    num_running: int = 0
    kv_usage_ratio: float = 0.0
    num_cached_tokens: int | None = None
    num_in_flight: int | None = None
    num_in_flight_tokens: int | None = None
    last_cold_use: float | None = None


Filter = Callable[[Sequence[Endpoint], int, Any], list[Endpoint]]
Scorer = Callable[[Sequence[Endpoint], int, Any], list[float]]


# --- Filters: the endpoints that a profile considers ---


def by_label(endpoints: Sequence[Endpoint], num_tokens: int, parameters: ByLabel) -> list[Endpoint]:
    """Return the endpoints whose label has one of the values, or that lack the label if that is allowed."""
    return [
        endpoint
        for endpoint in endpoints
        if (
            endpoint.labels[parameters.label] in parameters.validValues
            if parameters.label in endpoint.labels
            else parameters.allowsNoLabel
        )
    ]


def by_selector(endpoints: Sequence[Endpoint], num_tokens: int, parameters: Selector) -> list[Endpoint]:
    """Return the endpoints that match a Kubernetes label selector. An empty selector matches all."""
    wanted = parameters.matchLabels.items()
    return [
        endpoint
        for endpoint in endpoints
        if all(endpoint.labels.get(key) == value for key, value in wanted)
        and all(_matches(endpoint.labels, expression) for expression in parameters.matchExpressions)
    ]


def _matches(labels: Mapping[str, str], expression: LabelExpression) -> bool:
    key = expression.key
    match expression.operator:
        case "In":
            return labels.get(key) in expression.values
        case "NotIn":
            return labels.get(key) not in expression.values
        case "Exists":
            return key in labels
        case _:
            return key not in labels


def by_role(role: str) -> Filter:
    """Return the filter for endpoints that can decode, or can prefill."""

    def keep(endpoints: Sequence[Endpoint], num_tokens: int, parameters: Any) -> list[Endpoint]:
        return [endpoint for endpoint in endpoints if endpoint.labels.get(ROLE_LABEL) in _ROLES[role]]

    return keep


def prefix_cache_affinity(
    endpoints: Sequence[Endpoint], num_tokens: int, parameters: PrefixCacheAffinity
) -> list[Endpoint]:
    """Return the endpoints that hold most of the prompt, unless the best of them is too much slower than the best other."""
    total, threshold = max(1, num_tokens), parameters.affinityThreshold
    warm = [endpoint for endpoint in endpoints if (endpoint.num_cached_tokens or 0) / total >= threshold]
    cold = [endpoint for endpoint in endpoints if endpoint not in warm]
    if not warm or not cold:
        return list(endpoints)
    penalty = min(_ttft_seconds(endpoint, parameters) for endpoint in warm)
    penalty -= min(_ttft_seconds(endpoint, parameters) for endpoint in cold)
    is_known = parameters.maxTTFTPenaltyMs > 0 and parameters.ttftSource == "prefillThroughput"
    is_too_slow = is_known and penalty * 1000 > parameters.maxTTFTPenaltyMs
    return list(endpoints) if is_too_slow else warm


def _ttft_seconds(endpoint: Endpoint, parameters: PrefixCacheAffinity) -> float:
    throughput = parameters.peakPrefillThroughput
    return (endpoint.num_in_flight_tokens or 0) / throughput if throughput else 0.0


FILTERS: dict[str, tuple[type[Any], Filter]] = {
    "by-label": (ByLabel, by_label),
    "by-label-selector": (Selector, by_selector),
    "label-selector-filter": (Selector, by_selector),
    "decode-filter": (NoParameters, by_role("decode")),
    "prefill-filter": (NoParameters, by_role("prefill")),
    "prefix-cache-affinity-filter": (PrefixCacheAffinity, prefix_cache_affinity),
}


# --- Scorers: a profile's preference for each endpoint, from 0 to 1 ---


def load_aware(endpoints: Sequence[Endpoint], num_tokens: int, parameters: LoadAware) -> list[float]:
    """Return 0.5 · (1 − min(q, t)/t) for q waiting requests. An empty queue scores one half."""
    limit = parameters.threshold
    return [0.5 * (1 - min(endpoint.num_waiting, limit) / limit) for endpoint in endpoints]


def queue(endpoints: Sequence[Endpoint], num_tokens: int, parameters: NoParameters) -> list[float]:
    """Return 1 for the fewest waiting requests and 0 for the most."""
    return _fewest_first([endpoint.num_waiting for endpoint in endpoints])


def running(endpoints: Sequence[Endpoint], num_tokens: int, parameters: NoParameters) -> list[float]:
    """Return 1 for the fewest running requests and 0 for the most."""
    return _fewest_first([endpoint.num_running for endpoint in endpoints])


def _fewest_first(values: Sequence[int]) -> list[float]:
    lowest, highest = min(values, default=0), max(values, default=0)
    return [(highest - value) / (highest - lowest) if highest > lowest else 1.0 for value in values]


def kv_cache(endpoints: Sequence[Endpoint], num_tokens: int, parameters: NoParameters) -> list[float]:
    """Return the free share of KV space."""
    return [1 - endpoint.kv_usage_ratio for endpoint in endpoints]


def prefix_cache(endpoints: Sequence[Endpoint], num_tokens: int, parameters: PrefixCacheScoring) -> list[float]:
    """Return w · min(1, m/s)² + (1 − w) · m/n for m cached of n tokens, length scale s and weight w."""
    weight, scale, total = parameters.matchLengthWeight, parameters.matchLengthScaleTokens, max(1, num_tokens)
    lengths = [min(1.0, (endpoint.num_cached_tokens or 0) / scale) for endpoint in endpoints]
    shares = [(endpoint.num_cached_tokens or 0) / total for endpoint in endpoints]
    return [weight * length**2 + (1 - weight) * share for length, share in zip(lengths, shares, strict=True)]


def precise_prefix_cache(endpoints: Sequence[Endpoint], num_tokens: int, parameters: NoParameters) -> list[float]:
    """Return the scores of `prefix_cache` with its default parameters."""
    return prefix_cache(endpoints, num_tokens, PrefixCacheScoring())


def active_requests(endpoints: Sequence[Endpoint], num_tokens: int, parameters: ActiveRequests) -> list[float]:
    """Return 1 for an idle endpoint, (max − x)/max · maxBusyScore for a busy one."""
    counts = [endpoint.num_in_flight or 0 for endpoint in endpoints]
    idle, busy_score, highest = parameters.idleThreshold, parameters.maxBusyScore, max(counts, default=0)
    return [1.0 if count <= idle else (highest - count) / highest * busy_score for count in counts]


def token_load(endpoints: Sequence[Endpoint], num_tokens: int, parameters: TokenLoad) -> list[float]:
    """Return 1 − min(load, t)/t, where the load is the tokens in flight and the uncached tokens of this request.

    An endpoint without figures counts as empty.
    """
    limit = parameters.queueThresholdTokens
    return [1 - min(_token_load(endpoint, num_tokens), limit) / limit for endpoint in endpoints]


def _token_load(endpoint: Endpoint, num_tokens: int) -> int:
    if endpoint.num_in_flight_tokens is None:
        return 0
    return endpoint.num_in_flight_tokens + max(0, num_tokens - (endpoint.num_cached_tokens or 0))


def no_hit_lru(endpoints: Sequence[Endpoint], num_tokens: int, parameters: NoParameters) -> list[float]:
    """Return, for a request that nobody has cached, 1 for the endpoint that took such a request longest ago, 0 for the last."""
    if any(endpoint.num_cached_tokens for endpoint in endpoints):
        return [0.5] * len(endpoints)
    never = float("-inf")
    times = [never if endpoint.last_cold_use is None else endpoint.last_cold_use for endpoint in endpoints]
    order = sorted(range(len(endpoints)), key=lambda position: times[position])
    last = max(1, len(endpoints) - 1)
    return [1 - order.index(position) / last for position in range(len(endpoints))]


SCORERS: dict[str, tuple[type[Any], Scorer]] = {
    "load-aware-scorer": (LoadAware, load_aware),
    "queue-scorer": (NoParameters, queue),
    "running-requests-size-scorer": (NoParameters, running),
    "kv-cache-utilization-scorer": (NoParameters, kv_cache),
    "prefix-cache-scorer": (PrefixCacheScoring, prefix_cache),
    "precise-prefix-cache-scorer": (NoParameters, precise_prefix_cache),
    "active-request-scorer": (ActiveRequests, active_requests),
    "token-load-scorer": (TokenLoad, token_load),
    "no-hit-lru-scorer": (NoParameters, no_hit_lru),
}
