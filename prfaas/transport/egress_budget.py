"""What several links may send together, shared among those that have something to send."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from math import inf, isinf
from typing import NamedTuple, TypeVar

from prfaas.transport.learned_rate import LearnedRate

T = TypeVar("T")


class Demand(NamedTuple):
    """What one link asks of a budget."""

    is_busy: bool  # it has transfers under way
    bytes_per_second: float  # that it could use; infinity: all it gets
    carried_bytes_per_second: float = 0.0  # while bytes wait for it; 0: none do
    lost_bytes_per_second: float = 0.0  # sent again meanwhile


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
        """`bytes_per_second` 0: what the way that the links share carries without loss, as they find out."""
        self._bytes_per_second = bytes_per_second
        self._learned = LearnedRate()
        self._lock = threading.Lock()
        self._demands: dict[Hashable, Demand] = {}

    @property
    def bytes_per_second(self) -> float:
        """The limit at present; infinity: there is none."""
        return self._bytes_per_second or self._learned.bytes_per_second

    def share(self, link: Hashable, demand: Demand, *, now: float) -> float:
        """What this link may send a second from here on, 0: as much as it can; an idle one what it would get if it began."""
        with self._lock:
            self._demands[link] = demand
            if not self._bytes_per_second and demand.is_busy:
                self._learn(now)
            total = self.bytes_per_second
            wanted = {name: its.bytes_per_second for name, its in self._demands.items() if its.is_busy or name == link}
        if isinf(total):
            return 0.0
        if not demand.is_busy:
            wanted[link] = inf
        return fair_shares(total, wanted)[link]

    def _learn(self, now: float) -> None:
        full = [its for its in self._demands.values() if its.is_busy and its.carried_bytes_per_second]
        if full:
            self._learned.observe(
                now,
                carried=sum(its.carried_bytes_per_second for its in full),
                lost=sum(its.lost_bytes_per_second for its in full),
            )

    def forget(self, link: Hashable) -> None:
        """A link is closed."""
        with self._lock:
            self._demands.pop(link, None)
