"""Which instance of several equal ones: the one that has most of the prompt, as long as it is not overloaded."""

from __future__ import annotations

from collections.abc import Iterable

from prfaas.scheduler.snapshot import InstanceState, RequestFacts

LOAD_SLACK = 4  # requests that a node with the better cache may be ahead of the least loaded one


def choose(candidates: Iterable[InstanceState], request: RequestFacts) -> InstanceState | None:
    """The instance whose node holds most of the prompt, the conversation's own among equals, unless it is overloaded.

    Among instances that hold as much: the fewest requests under way, then the first by name.
    """
    usable = [one for one in candidates if one.healthy and one.instance not in request.excluded]
    if not usable:
        return None
    least = min(one.num_requests for one in usable)
    return min(
        (one for one in usable if one.num_requests <= least + LOAD_SLACK),
        key=lambda one: (
            -request.cached_at(one.agent),
            one.agent != request.session_agent,
            one.num_requests,
            one.instance,
        ),
    )
