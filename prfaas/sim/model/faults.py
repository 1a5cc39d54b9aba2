"""Planned events of a run: instances die or change roles, the egress of a cluster carries less for a while."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from prfaas.errors import ConfigError
from prfaas.types import ClusterName, InstanceId, InstanceRole
from prfaas.units import parse_seconds

Event = TypeVar("Event")
# "h200-000@5m+2m", "h200@5m=30%+2m": name, start, optional value, duration.
_EVENT = re.compile(r"([^@]*)@([^=+]*)(?:=([^+]*))?\+(.*)")


@dataclass(frozen=True)
class Outage:
    """Death of an instance and its cache from `start` on; after `seconds` it returns empty."""

    instance: InstanceId
    start: float
    seconds: float


@dataclass(frozen=True)
class PlannedRoleChange:
    """Role change: from `start` on the instance drains, and `seconds` after its last request it has the new role.

    A second change of the same instance waits for the end of the first. An instance that dies during its change has the
    new role when it returns, or when the change ends if that is later.
    """

    instance: InstanceId
    start: float
    role: InstanceRole
    seconds: float


@dataclass(frozen=True)
class EgressChange:
    """Reduction of a cluster's egress to `share` of its rate for `seconds`; at 0 its links are down."""

    cluster: ClusterName
    start: float
    share: float
    seconds: float


@dataclass(frozen=True)
class PlannedEvents:
    """Events of a run. Dead instances and links are noticed after `notice_seconds`; their requests are then sent again."""

    outages: Sequence[Outage] = ()
    role_changes: Sequence[PlannedRoleChange] = ()
    egress_changes: Sequence[EgressChange] = ()
    notice_seconds: float = 5.0


def read_outages(text: str) -> list[Outage]:
    """Parse outages such as "pd-003@2m+30s, ...": instance, start, duration.

    Raises:
        ConfigError: the text is malformed, or an instance would die while it is dead.
    """

    def outage(name: str, start: float, value: str | None, seconds: float) -> Outage:
        if value is not None:
            raise ValueError(value)
        return Outage(InstanceId(name), start, seconds)

    outages = _read(text, outage, 'outages: write "pd-003@2m+30s"')
    for first, second in pairwise(sorted(outages, key=lambda event: (event.instance, event.start))):
        if first.instance == second.instance and second.start <= first.start + first.seconds:
            raise ConfigError(
                f"outages: {first.instance} is dead from {first.start:g}s to {first.start + first.seconds:g}s and dies at"
                f" {second.start:g}s; write one after the other"
            )
    return outages


def read_role_changes(text: str) -> list[PlannedRoleChange]:
    """Parse role changes such as "pd-003@2m=decode+30s, ...": instance, start, new role, duration.

    Raises:
        ConfigError: the text is malformed.
    """

    def role_change(name: str, start: float, value: str | None, seconds: float) -> PlannedRoleChange:
        if value not in ("prefill", "decode"):
            raise ValueError(value)
        return PlannedRoleChange(InstanceId(name), start, "prefill" if value == "prefill" else "decode", seconds)

    return _read(text, role_change, 'role_changes: write "pd-003@2m=decode+30s", or prefill')


def read_egress_changes(text: str) -> list[EgressChange]:
    """Parse changes such as "h200@5m=30%+2m, h200@9m=0%+30s": cluster, start, share of the egress, duration.

    Raises:
        ConfigError: the text is malformed.
    """

    def egress_change(name: str, start: float, value: str | None, seconds: float) -> EgressChange:
        ratio = float((value or "").removesuffix("%")) / 100
        if not value or not value.endswith("%") or not 0 <= ratio <= 1:
            raise ValueError(value)
        return EgressChange(ClusterName(name), start, ratio, seconds)

    return _read(text, egress_change, 'link_changes: write "h200@5m=30%+2m", 0% for a link that is down')


def _read(text: str, build: Callable[[str, float, str | None, float], Event], accepted: str) -> list[Event]:
    events = []
    for item in filter(None, map(str.strip, text.split(","))):
        try:
            if (parts := _EVENT.fullmatch(item)) is None:
                raise ValueError(item)
            name, start, value, seconds = parts.groups()
            events.append(build(name, parse_seconds(start), value, parse_seconds(seconds)))
        except ValueError:
            raise ConfigError(f"{accepted}; got {text!r}") from None
    return events
