"""llm-d's scorers: how much a profile likes each endpoint, from 0 to 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prfaas.scheduler.endpoint_picker.endpoint import Endpoint, PickRequest
from prfaas.scheduler.endpoint_picker.filters import session_endpoint
from prfaas.scheduler.endpoint_picker.parameters import (
    ActiveRequests,
    LoadAware,
    NoHitLru,
    NoParameters,
    PrecisePrefixCache,
    PrefixCache,
    TokenLoad,
)

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


def prefix_cache(endpoints: Sequence[Endpoint], request: PickRequest, its: PrefixCache) -> list[float]:
    """w · min(1, m·b/s)² + (1 − w) · m/n for m matched of n blocks of b tokens, scale s and weight w of the length."""
    weight, total = its.matchLengthWeight, max(1, request.num_blocks)
    lengths = [min(1.0, request.cached_tokens(endpoint) / its.matchLengthScaleTokens) for endpoint in endpoints]
    shares = [(endpoint.num_matched_blocks or 0) / total for endpoint in endpoints]
    return [weight * length**2 + (1 - weight) * share for length, share in zip(lengths, shares, strict=True)]


def precise_prefix_cache(endpoints: Sequence[Endpoint], request: PickRequest, its: PrecisePrefixCache) -> list[float]:
    """As `prefix_cache` without parameters."""
    return prefix_cache(endpoints, request, PrefixCache())


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
    "prefix-cache-scorer": (PrefixCache, prefix_cache),
    "precise-prefix-cache-scorer": (PrecisePrefixCache, precise_prefix_cache),
    "active-request-scorer": (ActiveRequests, active_requests),
    "token-load-scorer": (TokenLoad, token_load),
    "no-hit-lru-scorer": (NoHitLru, no_hit_lru),
    "session-affinity-scorer": (NoParameters, session_affinity),
    "lora-affinity-scorer": (NoParameters, lora_affinity),
}
