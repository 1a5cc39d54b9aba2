"""When nothing runs any more on a node that gets nothing new."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prfaas.errors import IndexRefusal
from prfaas.index.membership import Member
from prfaas.manager.state.world import World
from prfaas.types import AgentName, InstanceId

SETTLE_SECONDS = 3.0  # after which every request sent to an instance before it drained is in its reported load
_POLL_SECONDS = 0.1


def live_member(world: World, name: AgentName) -> Member:
    """Raises IndexRefusal: the node is unknown or silent."""
    for member in world.live():
        if member.node.name == name:
            return member
    raise IndexRefusal("unknown_node", f"{name} is unknown or silent")


def requests_by_instance(member: Member) -> dict[InstanceId, int]:
    """Running and waiting requests by instance, as the node's agent reports them."""
    return {engine.instance: engine.num_running + engine.num_waiting for engine in member.figures.engines}


def unreported_instances(member: Member) -> set[InstanceId]:
    """Instances of which the node's agent says nothing: they may run anything."""
    return {engine.instance for engine in member.node.engines} - requests_by_instance(member).keys()


async def until_idle(world: World, name: AgentName, *, seconds: float, clock: Callable[[], float]) -> Member:
    """Wait until what was sent to a node before it got nothing new has ended, or `seconds`; the node as it is then.

    Raises:
        IndexRefusal: the node is silent.
    """
    started = clock()
    while (waited := clock() - started) < seconds:
        member = live_member(world, name)
        if (
            waited >= SETTLE_SECONDS
            and not unreported_instances(member)
            and not any(requests_by_instance(member).values())
        ):
            break
        await asyncio.sleep(_POLL_SECONDS)
    return live_member(world, name)
