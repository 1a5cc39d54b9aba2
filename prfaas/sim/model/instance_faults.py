"""What happens to a deployment while it serves: an instance dies and comes back, or takes another role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from prfaas.errors import ConfigError
from prfaas.sim.model.link_faults import LinkChange
from prfaas.types import InstanceId, InstanceRole
from prfaas.units import parse_seconds

Operation = TypeVar("Operation")


@dataclass(frozen=True)
class Outage:
    """An instance is dead from `start` on for so many seconds, its cache with it, and comes back empty."""

    instance: InstanceId
    start: float
    seconds: float


@dataclass(frozen=True)
class RoleChange:
    """From `start` on an instance takes no new requests; `seconds` after its last one it has its new role.

    One that begins before another of the instance has ended waits for that. An instance that dies meanwhile has its new
    role when it is back, or when its change has ended if that is later.
    """

    instance: InstanceId
    start: float
    role: InstanceRole
    seconds: float


@dataclass(frozen=True)
class Operations:
    """All of a run. What is dead, or a link that is down, is known to be so `notice_seconds` later: its requests are then
    sent again."""

    outages: Sequence[Outage] = ()
    role_changes: Sequence[RoleChange] = ()
    link_changes: Sequence[LinkChange] = ()
    notice_seconds: float = 5.0


def read_outages(text: str) -> list[Outage]:
    """ "pd-003@2m+30s, ...": which instance, from when on, for how long.

    Raises:
        ConfigError: it is not written so, or an instance would die while it is dead.
    """
    outages = _read(text, _outage, 'outages: write "pd-003@2m+30s"')
    for one, after in pairwise(sorted(outages, key=lambda its: (its.instance, its.start))):
        if one.instance == after.instance and after.start <= one.start + one.seconds:
            dead = f"dead from {one.start:g}s to {one.start + one.seconds:g}s"
            raise ConfigError(
                f"outages: {one.instance} is {dead} and dies at {after.start:g}s; write one after the other"
            )
    return outages


def read_role_changes(text: str) -> list[RoleChange]:
    """ "pd-003@2m=decode+30s, ...": which instance, when, its new role, and how long that takes.

    Raises:
        ConfigError: it is not written so.
    """
    return _read(text, _role_change, 'role_changes: write "pd-003@2m=decode+30s", or prefill')


def _read(text: str, read: Callable[[str], Operation], accepted: str) -> list[Operation]:
    try:
        return [read(item.strip()) for item in text.split(",") if item.strip()]
    except ValueError:
        raise ConfigError(f"{accepted}; got {text!r}") from None


def _outage(item: str) -> Outage:
    name, start, seconds = _parts(item)
    return Outage(name, parse_seconds(start), parse_seconds(seconds))


def _role_change(item: str) -> RoleChange:
    name, when, seconds = _parts(item)
    start, _, role = when.partition("=")
    if role not in ("prefill", "decode"):
        raise ValueError(role)
    return RoleChange(name, parse_seconds(start), "prefill" if role == "prefill" else "decode", parse_seconds(seconds))


def _parts(item: str) -> tuple[InstanceId, str, str]:
    name, _, rest = item.partition("@")
    when, _, seconds = rest.partition("+")
    return InstanceId(name), when, seconds
