"""When nothing runs any more on a node that gets nothing new."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prfaas.errors import IndexRefusal
from prfaas.index.membership import Member
from prfaas.manager.world import World
from prfaas.types import AgentName, InstanceId

SETTLE_SECONDS = 3.0  # after which every request sent to an instance before it drained is in its reported load
_POLL_SECONDS = 0.1


def live_member(world: World, name: AgentName) -> Member:
    """Raises IndexRefusal: the node is unknown or silent."""
    for member in world.live():
        if member.node.name == name:
            return member
    raise IndexRefusal("unknown_node", f"{name} is unknown or silent")


def requests_of(member: Member) -> dict[InstanceId, int]:
    """Running and waiting requests by instance, as the node's agent reports them."""
    return {its.instance: its.num_running + its.num_waiting for its in member.figures.engines}


async def until_idle(
    world: World, name: AgentName, *, seconds: float, clock: Callable[[], float]
) -> dict[InstanceId, int]:
    """Wait until what was sent to a node before it got nothing new has ended; what runs after `seconds`, if it has not.

    Raises:
        IndexRefusal: the node is silent.
    """
    started = clock()
    while (waited := clock() - started) < seconds:
        if waited >= SETTLE_SECONDS and not any(requests_of(live_member(world, name)).values()):
            break
        await asyncio.sleep(_POLL_SECONDS)
    return requests_of(live_member(world, name))
