"""Choice among equal instances: the one with the least work ahead of a new request."""

import zlib
from collections.abc import Iterable
from typing import Literal

from prfaas.scheduler.snapshot import InstanceState, RequestFacts

# Reasons for a session to leave its node: its KV is full, it has far more requests than another, or it is not available.
LeaveReason = Literal["session_node_full", "session_node_slow", "session_node_gone"]
REQUEST_TOKENS = 4096  # Work of a running request: about the uncached tokens of an 8K prompt.
LOAD_SLACK = 32  # An instance with this many requests more than the least loaded one takes no new request.
SESSION_TOKENS = 4 * REQUEST_TOKENS  # Cached tokens to assume on the session's node while the caches are unknown.
AWAY_TOKENS = 4 * REQUEST_TOKENS  # Work that another PD cluster must save a request.
KV_AMPLE_RATIO = 0.8  # Below this share of KV blocks in use no request waits for blocks.
KV_FULL_RATIO = 0.98  # Above this share requests wait for blocks or preempt others, so the instance is full.
KV_WAIT_TOKENS = 16 * REQUEST_TOKENS  # Work that represents the wait at an instance that is almost full.


def tie_break(instance: InstanceState, request: RequestFacts) -> int:
    """Return a random rank of an instance for this request, so that simultaneous requests spread over equal instances."""
    return zlib.crc32(f"{request.seed} {instance.instance}".encode()) if request.seed else 0


def choose_instance(candidates: Iterable[InstanceState], request: RequestFacts) -> InstanceState | None:
    """Return the instance with the fewest tokens to compute before it can answer; None without a usable instance.

    These are the prompt's uncached tokens, those of running requests, and the costs of waiting for KV blocks and of
    leaving the home cluster.
    An instance that is full, or far busier than the others, is used only if all are.
    Among equals the session's node wins, then `request.seed` decides.
    """
    knows = request.num_cached_tokens or any(request.cached_tokens.values())

    def cost(instance: InstanceState) -> tuple[int, bool, int, str]:
        is_own = instance.agent == request.session_agent
        cached = SESSION_TOKENS if is_own and not knows else request.cached_at(instance.agent)
        ahead = instance.num_requests * REQUEST_TOKENS - cached
        if instance.kv_usage_ratio > KV_AMPLE_RATIO:
            ahead += _kv_wait_tokens(instance.kv_usage_ratio)
        if request.home and instance.cluster != request.home:
            ahead += AWAY_TOKENS
        return ahead, not is_own, tie_break(instance, request), instance.instance

    return min(_not_slow(_not_full(usable(candidates, request))), key=cost, default=None)


def session_node(candidates: Iterable[InstanceState], request: RequestFacts) -> list[InstanceState] | LeaveReason:
    """Return the instances of the session's node that can take its next turn whatever their load, or why there are none."""
    left = usable(candidates, request)
    stages: tuple[tuple[LeaveReason, list[InstanceState]], ...] = (
        ("session_node_gone", left),
        ("session_node_full", with_room := _not_full(left)),
        ("session_node_slow", _not_slow(with_room)),
    )
    own: list[InstanceState] = []
    for reason, instances in stages:
        own = [instance for instance in instances if instance.agent == request.session_agent]
        if not own:
            return reason
    return own


def usable(candidates: Iterable[InstanceState], request: RequestFacts) -> list[InstanceState]:
    """Return the healthy instances that this request has not tried yet."""
    return [candidate for candidate in candidates if candidate.healthy and candidate.instance not in request.excluded]


def _not_full(instances: list[InstanceState]) -> list[InstanceState]:
    """Return the instances with free KV blocks; all of them if none has any."""
    return [instance for instance in instances if instance.kv_usage_ratio < KV_FULL_RATIO] or instances


def _not_slow(instances: list[InstanceState]) -> list[InstanceState]:
    """Return the instances that are not far busier than the least loaded one."""
    least = min((instance.num_requests for instance in instances), default=0)
    return [instance for instance in instances if instance.num_requests <= least + LOAD_SLACK]


def _kv_wait_tokens(kv_usage_ratio: float) -> int:
    """Return the work that represents the wait for KV blocks. It grows with the square of the scarcity."""
    scarcity = (min(kv_usage_ratio, 1.0) - KV_AMPLE_RATIO) / (KV_FULL_RATIO - KV_AMPLE_RATIO)
    return int(KV_WAIT_TOKENS * scarcity**2)
