"""What several links may send together, shared among those that have something to send."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Demand(NamedTuple):
    """What one link asks of a budget."""

    is_busy: bool  # it has transfers under way
    bytes_per_second: float  # that it could use; infinity: all it gets


def fair_shares(total: float, demands: Mapping[T, float]) -> dict[T, float]:
    """Max-min fair: who wants less than an equal share gets that, the others divide the rest equally.

    What nobody wants is divided equally as well: a demand is what a link could use a moment ago.
    """
    shares: dict[T, float] = {}
    left = total
    waiting = sorted(demands, key=demands.__getitem__)
    for number, name in enumerate(waiting):
        shares[name] = min(demands[name], left / (len(waiting) - number))
        left -= shares[name]
    return {name: share + left / len(shares) for name, share in shares.items()}


class EgressBudget:
    """Called by the links' own threads. A link that has just become busy has its share at its next call."""

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._demands: dict[Hashable, Demand] = {}

    def share(self, link: Hashable, demand: Demand) -> float:
        """What this link may send a second from here on; an idle one what it would get if it began to send."""
        with self._lock:
            self._demands[link] = demand
            wanted = {name: its.bytes_per_second for name, its in self._demands.items() if its.is_busy or name == link}
        if not demand.is_busy:
            wanted[link] = float("inf")
        return fair_shares(self.bytes_per_second, wanted)[link]

    def forget(self, link: Hashable) -> None:
        """A link is closed."""
        with self._lock:
            self._demands.pop(link, None)
