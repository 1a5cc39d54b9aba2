"""What happens to the egress of a cluster while it serves: it carries less for a while, or nothing; others burst over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prfaas import config
from prfaas.config import setting
from prfaas.errors import ConfigError
from prfaas.sim.model.network import Egress
from prfaas.types import ClusterName
from prfaas.units import parse_seconds


@dataclass(frozen=True)
class LinkChange:
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


def read_link_changes(text: str) -> list[LinkChange]:
    """ "h200@5m=30%+2m, h200@9m=0%+30s": whose egress, when, what it carries, for how long.

    Raises:
        ConfigError: it is not written so.
    """
    try:
        return [_change(item.strip()) for item in text.split(",") if item.strip()]
    except ValueError:
        raise ConfigError(f'link_changes: write "h200@5m=30%+2m", 0% for a link that is down; got {text!r}') from None


def _change(item: str) -> LinkChange:
    name, _, rest = item.partition("@")
    when, _, what = rest.partition("=")
    share, _, seconds = what.partition("+")
    ratio = float(share.removesuffix("%")) / 100
    if not share.endswith("%") or not 0 <= ratio <= 1:
        raise ValueError(share)
    return LinkChange(ClusterName(name), parse_seconds(when), ratio, parse_seconds(seconds))


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


def bursts(others: CrossTraffic, clusters: Sequence[ClusterName], *, end: float, seed: int) -> list[LinkChange]:
    """Return the bursts over each cluster's egress that begin before `end`."""
    generator = np.random.default_rng([seed, 1])
    found = []
    for cluster in clusters:
        moment = float(generator.exponential(others.off))
        while moment < end:
            seconds = float(generator.exponential(others.on))
            found.append(LinkChange(cluster, moment, 1.0 - others.share, seconds))
            moment += seconds + float(generator.exponential(others.off))
    return found


class Shares:
    """What is left of a rate while changes are in force; two at once multiply."""

    def __init__(self, egress: Egress, bytes_per_second: float) -> None:
        self._egress, self._full = egress, bytes_per_second
        self._in_force: list[LinkChange] = []

    @property
    def is_down(self) -> bool:
        return any(not change.share for change in self._in_force)

    def begin(self, change: LinkChange) -> None:
        """From here on."""
        self._in_force.append(change)
        self._apply()

    def end(self, change: LinkChange) -> None:
        """No longer."""
        self._in_force.remove(change)
        self._apply()

    def _apply(self) -> None:
        rate = self._full
        for change in self._in_force:
            rate *= change.share
        self._egress.set_rate(rate)
