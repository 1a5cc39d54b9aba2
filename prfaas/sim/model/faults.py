"""Planned events of a run: instances die or change roles, the egress of a cluster carries less for a while."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from prfaas.errors import ConfigError
from prfaas.types import ClusterName, InstanceId, InstanceRole
from prfaas.units import parse_ratio, parse_seconds

Target = TypeVar("Target")
Value = TypeVar("Value")
# "h200-000@5m+2m", "h200@5m=30%+2m": name, start, optional value, duration.
_EVENT = re.compile(r"([^@]*)@([^=+]*)(?:=([^+]*))?\+(.*)")


@dataclass(frozen=True)
class PlannedEvent(Generic[Target, Value]):
    """Event of an instance or a cluster from `start` on, and what it changes to."""

    target: Target
    start: float
    seconds: float
    value: Value


# Death of an instance and its cache; after `seconds` it returns empty.
Outage = PlannedEvent[InstanceId, None]
# From `start` on the instance drains, and `seconds` after its last request it has the new role. A second change of the
# same instance waits for the end of the first. An instance that dies during its change has the new role when it returns,
# or when the change ends if that is later.
PlannedRoleChange = PlannedEvent[InstanceId, InstanceRole]
# Reduction of a cluster's egress to a share of its rate for `seconds`; at 0 its links are down.
EgressChange = PlannedEvent[ClusterName, float]


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
    outages = _read(text, InstanceId, _nothing, 'outages: write "pd-003@2m+30s"')
    for first, second in pairwise(sorted(outages, key=lambda event: (event.target, event.start))):
        if first.target == second.target and second.start <= first.start + first.seconds:
            raise ConfigError(
                f"outages: {first.target} is dead from {first.start:g}s to {first.start + first.seconds:g}s and dies at"
                f" {second.start:g}s; write one after the other"
            )
    return outages


def read_role_changes(text: str) -> list[PlannedRoleChange]:
    """Parse role changes such as "pd-003@2m=decode+30s, ...": instance, start, new role, duration.

    Raises:
        ConfigError: the text is malformed.
    """
    return _read(text, InstanceId, _role, 'role_changes: write "pd-003@2m=decode+30s", or prefill')


def read_egress_changes(text: str) -> list[EgressChange]:
    """Parse changes such as "h200@5m=30%+2m, h200@9m=0%+30s": cluster, start, share of the egress, duration.

    Raises:
        ConfigError: the text is malformed.
    """
    return _read(text, ClusterName, _share, 'link_changes: write "h200@5m=30%+2m", 0% for a link that is down')


def _nothing(value: str | None) -> None:
    if value is not None:
        raise ValueError(value)


def _role(value: str | None) -> InstanceRole:
    if value not in ("prefill", "decode"):
        raise ValueError(value)
    return "prefill" if value == "prefill" else "decode"


def _share(value: str | None) -> float:
    if not value or not value.endswith("%"):
        raise ValueError(value)
    return parse_ratio(value)


def _read(
    text: str, target: Callable[[str], Target], parse: Callable[[str | None], Value], accepted: str
) -> list[PlannedEvent[Target, Value]]:
    events = []
    for item in filter(None, map(str.strip, text.split(","))):
        try:
            if (parts := _EVENT.fullmatch(item)) is None:
                raise ValueError(item)
            name, start, value, seconds = parts.groups()
            events.append(PlannedEvent(target(name), parse_seconds(start), parse_seconds(seconds), parse(value)))
        except ValueError:
            raise ConfigError(f"{accepted}; got {text!r}") from None
    return events
