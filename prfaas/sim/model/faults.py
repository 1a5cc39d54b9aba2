"""What happens to the egress of a cluster while it serves: it carries less for a while, or nothing; others burst over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from prfaas import config
from prfaas.config import setting
from prfaas.errors import ConfigError
from prfaas.sim.model.network import Egress
from prfaas.types import ClusterName, InstanceId, InstanceRole
from prfaas.units import parse_seconds


@dataclass(frozen=True)
class EgressChange:
    """From `start` on, for so many seconds, a cluster's egress carries this share of its rate; 0: the link is down."""

    cluster: ClusterName
    start: float
    share: float
    seconds: float


@dataclass(frozen=True)
class CrossTraffic:
    """What others send over the same egress: bursts and pauses of exponential length."""

    on: float = setting("seconds", default=5.0, minimum=1e-3, doc="Mean length of a burst.")
    off: float = setting("seconds", default=20.0, minimum=1e-3, doc="Mean pause between two.")
    share: float = setting("ratio", default=0.5, maximum=0.99, doc="What a burst takes of the egress.")


def read_link_changes(text: str) -> list[EgressChange]:
    """ "h200@5m=30%+2m, h200@9m=0%+30s": whose egress, when, what it carries, for how long.

    Raises:
        ConfigError: it is not written so.
    """
    try:
        return [_change(item.strip()) for item in text.split(",") if item.strip()]
    except ValueError:
        raise ConfigError(f'link_changes: write "h200@5m=30%+2m", 0% for a link that is down; got {text!r}') from None


def _change(item: str) -> EgressChange:
    name, _, rest = item.partition("@")
    when, _, what = rest.partition("=")
    share, _, seconds = what.partition("+")
    ratio = float(share.removesuffix("%")) / 100
    if not share.endswith("%") or not 0 <= ratio <= 1:
        raise ValueError(share)
    return EgressChange(ClusterName(name), parse_seconds(when), ratio, parse_seconds(seconds))


def read_cross_traffic(text: str) -> CrossTraffic | None:
    """ "on=5s,off=20s,share=50%"; None where nothing is written.

    Raises:
        ConfigError: an unknown key, or a value that is none.
    """
    if not text.strip():
        return None
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    values = {key.strip(): value.strip() for key, _, value in pairs}
    return config.load_mapping(CrossTraffic, values, where=f"cross_traffic {text!r}")


def bursts(others: CrossTraffic, clusters: Sequence[ClusterName], *, end: float, seed: int) -> list[EgressChange]:
    """Return the bursts over each cluster's egress that begin before `end`."""
    generator = np.random.default_rng([seed, 1])
    found = []
    for cluster in clusters:
        moment = float(generator.exponential(others.off))
        while moment < end:
            seconds = float(generator.exponential(others.on))
            found.append(EgressChange(cluster, moment, 1.0 - others.share, seconds))
            moment += seconds + float(generator.exponential(others.off))
    return found


class Shares:
    """What is left of a rate while changes are in force; two at once multiply."""

    def __init__(self, egress: Egress, bytes_per_second: float) -> None:
        self._egress, self._full = egress, bytes_per_second
        self._in_force: list[EgressChange] = []

    @property
    def is_down(self) -> bool:
        return any(not change.share for change in self._in_force)

    def begin(self, change: EgressChange) -> None:
        """From here on."""
        self._in_force.append(change)
        self._apply()

    def end(self, change: EgressChange) -> None:
        """No longer."""
        self._in_force.remove(change)
        self._apply()

    def _apply(self) -> None:
        rate = self._full
        for change in self._in_force:
            rate *= change.share
        self._egress.set_rate(rate)


Operation = TypeVar("Operation")


@dataclass(frozen=True)
class Outage:
    """An instance is dead from `start` on for so many seconds, its cache with it, and comes back empty."""

    instance: InstanceId
    start: float
    seconds: float


@dataclass(frozen=True)
class PlannedRoleChange:
    """From `start` on an instance takes no new requests; `seconds` after its last one it has its new role.

    One that begins before another of the instance has ended waits for that. An instance that dies meanwhile has its new
    role when it is back, or when its change has ended if that is later.
    """

    instance: InstanceId
    start: float
    role: InstanceRole
    seconds: float


@dataclass(frozen=True)
class PlannedEvents:
    """All of a run. What is dead, or a link that is down, is known to be so `notice_seconds` later: its requests are then
    sent again."""

    outages: Sequence[Outage] = ()
    role_changes: Sequence[PlannedRoleChange] = ()
    link_changes: Sequence[EgressChange] = ()
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


def read_role_changes(text: str) -> list[PlannedRoleChange]:
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


def _role_change(item: str) -> PlannedRoleChange:
    name, when, seconds = _parts(item)
    start, _, role = when.partition("=")
    if role not in ("prefill", "decode"):
        raise ValueError(role)
    return PlannedRoleChange(
        name, parse_seconds(start), "prefill" if role == "prefill" else "decode", parse_seconds(seconds)
    )


def _parts(item: str) -> tuple[InstanceId, str, str]:
    name, _, rest = item.partition("@")
    when, _, seconds = rest.partition("+")
    return InstanceId(name), when, seconds
