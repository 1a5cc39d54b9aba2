"""Instances that get no new work until they are idle: before a role change, and on a node that drains."""

import asyncio
from collections.abc import Callable
from enum import Enum

from prfaas.index.membership import Member
from prfaas.manager.state.world import World
from prfaas.state_machine import TransitionTable
from prfaas.types import AgentName, InstanceId

SETTLE_SECONDS = 3.0  # Until then requests sent before the drain may be missing from the reported load.
POLL_SECONDS = 0.1


class RoleChangeState(Enum):
    """State of one role change."""

    SETTLING = "settling"
    DRAINING = "draining"
    APPLIED = "applied"
    WITHDRAWN = "withdrawn"


class RoleChangeEvent(Enum):
    """Event of one role change."""

    LOADS_SETTLED = "loads settled"
    BECAME_IDLE = "became idle"
    TIMED_OUT = "timed out"
    WITHDRAW = "withdraw"


_S, _E = RoleChangeState, RoleChangeEvent
TRANSITIONS = TransitionTable(
    "role change",
    _S.SETTLING,
    {
        (_S.SETTLING, _E.LOADS_SETTLED): _S.DRAINING,
        (_S.SETTLING, _E.TIMED_OUT): _S.APPLIED,
        (_S.SETTLING, _E.WITHDRAW): _S.WITHDRAWN,
        (_S.DRAINING, _E.BECAME_IDLE): _S.APPLIED,
        (_S.DRAINING, _E.TIMED_OUT): _S.APPLIED,
        (_S.DRAINING, _E.WITHDRAW): _S.WITHDRAWN,
    },
)


class RoleChangeProgress:
    """Progress of one role change, ordered by the plan or by an operator. Pure: callers pass monotonic time."""

    def __init__(self, *, timeout_seconds: float, now: float) -> None:
        self.state = TRANSITIONS.initial
        self._timeout_seconds = timeout_seconds
        self._started_at = now

    def seconds(self, now: float) -> float:
        """Return the seconds since the change began."""
        return now - self._started_at

    @property
    def is_final(self) -> bool:
        return self.state in TRANSITIONS.final_states

    def step(self, *, is_busy: bool, now: float) -> RoleChangeState:
        """Advance with time and load. `is_busy` means that an instance runs requests, or that its load is unknown."""
        if self.state is _S.SETTLING and self.seconds(now) >= SETTLE_SECONDS:
            self._apply(_E.LOADS_SETTLED)
        if not self.is_final and self.seconds(now) >= self._timeout_seconds:
            self._apply(_E.TIMED_OUT)
        elif self.state is _S.DRAINING and not is_busy:
            self._apply(_E.BECAME_IDLE)
        return self.state

    def withdraw(self) -> None:
        """Give up the change, if it is not over."""
        if not self.is_final:
            self._apply(_E.WITHDRAW)

    def _apply(self, event: RoleChangeEvent) -> None:
        self.state = TRANSITIONS.next(self.state, event)


def requests_by_instance(member: Member) -> dict[InstanceId, int]:
    """Return the running and waiting requests of each instance that answers the node's agent."""
    return {load.instance: load.num_running + load.num_waiting for load in member.figures.engines if not load.is_silent}


def unreported_instances(member: Member) -> set[InstanceId]:
    """Return the instances without a reported load, which may run anything."""
    return {engine.instance for engine in member.node.engines} - requests_by_instance(member).keys()


def is_busy(member: Member) -> bool:
    return bool(unreported_instances(member)) or any(requests_by_instance(member).values())


async def until_idle(world: World, name: AgentName, *, seconds: float, clock: Callable[[], float]) -> Member:
    """Wait at most `seconds` until a node without new work is idle, and return its present state.

    Raises:
        IndexRefusal: the node is silent.
    """
    member, progress = world.live_member(name), RoleChangeProgress(timeout_seconds=seconds, now=clock())
    while progress.step(is_busy=is_busy(member), now=clock()) is not RoleChangeState.APPLIED:
        await asyncio.sleep(POLL_SECONDS)
        member = world.live_member(name)
    return member
