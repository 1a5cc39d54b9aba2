"""Which instance of several equal ones: the one that has least work before it can answer."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from prfaas.scheduler.snapshot import InstanceState, RequestFacts

REQUEST_TOKENS = 4096  # the work that a request under way stands for: about what prompts of 8K tokens leave uncached
LOAD_SLACK = 32  # requests beyond the least loaded instance's: with more it is full, whatever it holds
SESSION_TOKENS = (
    4 * REQUEST_TOKENS
)  # what the conversation's own node is taken to hold while nothing is known of caches


def tie(one: InstanceState, request: RequestFacts) -> int:
    """What orders instances that are equally good for a request: by chance, so that a crowd of requests spreads."""
    return zlib.crc32(f"{request.seed} {one.instance}".encode()) if request.seed else 0


def choose(candidates: Iterable[InstanceState], request: RequestFacts) -> InstanceState | None:
    """The instance with the fewest tokens to compute: the prompt's uncached ones, and those of the requests under way;
    one that is full beside the others is left out.

    Among equals the conversation's own node, then by `request.seed`, so that a crowd of them spreads.
    """
    usable = [one for one in candidates if one.healthy and one.instance not in request.excluded]
    if not usable:
        return None
    least = min(one.num_requests for one in usable)
    knows = request.num_cached_tokens or any(request.cached_tokens.values())

    def cost(one: InstanceState) -> tuple[int, bool, int, str]:
        is_own = one.agent == request.session_agent
        cached = SESSION_TOKENS if is_own and not knows else request.cached_at(one.agent)
        return one.num_requests * REQUEST_TOKENS - cached, not is_own, tie(one, request), one.instance

    return min((one for one in usable if one.num_requests <= least + LOAD_SLACK), key=cost)
