"""Which instance of several equal ones: the one that has least work before it can answer."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Literal

from prfaas.scheduler.snapshot import InstanceState, RequestFacts

# Why a conversation leaves its node: its KV is full, it has many more requests than another, or it is not there.
LeaveReason = Literal["full", "slow", "gone"]
REQUEST_TOKENS = 4096  # the work that a request under way stands for: about what prompts of 8K tokens leave uncached
LOAD_SLACK = 32  # requests beyond the least loaded instance's: with more it is full, whatever it holds
# What the conversation's own node is taken to hold while nothing is known of caches:
SESSION_TOKENS = 4 * REQUEST_TOKENS
KV_AMPLE_RATIO = 0.8  # of an engine's KV blocks: with fewer in use no request waits for any
KV_FULL_RATIO = 0.98  # with more a request waits for blocks, or another is preempted and computed anew: it is full
KV_WAIT_TOKENS = 16 * REQUEST_TOKENS  # the work that this wait stands for where an engine is about to be full


def tie_break(one: InstanceState, request: RequestFacts) -> int:
    """What orders instances that are equally good for a request: by chance, so that a crowd of requests spreads."""
    return zlib.crc32(f"{request.seed} {one.instance}".encode()) if request.seed else 0


def choose_instance(candidates: Iterable[InstanceState], request: RequestFacts) -> InstanceState | None:
    """Return the instance with the fewest tokens to compute: the prompt's uncached ones, those of the requests under way, and
    what the wait for KV blocks costs; one that is full, by its KV or beside the others, is left out while one is not.

    Among equals the conversation's own node, then by `request.seed`, so that a crowd of them spreads.
    """
    knows = request.num_cached_tokens or any(request.cached_tokens.values())

    def cost(one: InstanceState) -> tuple[int, bool, int, str]:
        is_own = one.agent == request.session_agent
        cached = SESSION_TOKENS if is_own and not knows else request.cached_at(one.agent)
        ahead = one.num_requests * REQUEST_TOKENS - cached
        if one.kv_usage_ratio > KV_AMPLE_RATIO:
            ahead += _kv_wait_tokens(one.kv_usage_ratio)
        return ahead, not is_own, tie_break(one, request), one.instance

    return min(_brisk(_roomy(_usable(candidates, request))), key=cost, default=None)


def session_node(candidates: Iterable[InstanceState], request: RequestFacts) -> list[InstanceState] | LeaveReason:
    """The instances of the conversation's own node that take its next turn, whatever work is ahead there; or why none."""
    left = _usable(candidates, request)
    stages: tuple[tuple[LeaveReason, list[InstanceState]], ...] = (
        ("gone", left),
        ("full", roomy := _roomy(left)),
        ("slow", _brisk(roomy)),
    )
    own: list[InstanceState] = []
    for leaving, those in stages:
        own = [one for one in those if one.agent == request.session_agent]
        if not own:
            return leaving
    return own


def _usable(candidates: Iterable[InstanceState], request: RequestFacts) -> list[InstanceState]:
    return [candidate for candidate in candidates if candidate.healthy and candidate.instance not in request.excluded]


def _roomy(usable: list[InstanceState]) -> list[InstanceState]:
    """Return those whose KV is not full; all, where all are."""
    return [one for one in usable if one.kv_usage_ratio < KV_FULL_RATIO] or usable


def _brisk(roomy: list[InstanceState]) -> list[InstanceState]:
    """Return those that are not far behind the least loaded one."""
    least = min((one.num_requests for one in roomy), default=0)
    return [one for one in roomy if one.num_requests <= least + LOAD_SLACK]


def _kv_wait_tokens(kv_usage_ratio: float) -> int:
    """Return the work that the wait for KV blocks stands for: it grows with the square of what is used of the last of them."""
    scarcity = (min(kv_usage_ratio, 1.0) - KV_AMPLE_RATIO) / (KV_FULL_RATIO - KV_AMPLE_RATIO)
    return int(KV_WAIT_TOKENS * scarcity**2)
