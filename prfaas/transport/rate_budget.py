"""What several links, or several peers, may send together, shared among those that have something to send."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Mapping
from math import inf, isinf
from typing import NamedTuple, TypeVar

from prfaas.transport.learned_rate import LearnedRate

WINDOW_SECONDS = 1.0  # over which what a link carries is counted: layers leave in bursts, as prefill finishes them
# A full link that carries less than this of its share leaves the rest to others, with some room to grow.
UNUSED_RATIO = 0.8
SLOW_SECONDS = 2.0  # for so long: one that has just begun to send is still finding its rate
T = TypeVar("T")


class Use(NamedTuple):
    """What one link does; byte counts grow from its start."""

    is_busy: bool  # it has transfers under way
    is_full: bool  # and more of their bytes wait than it carries
    delivered_bytes: int
    retransmitted_bytes: int


class _Member:
    """One link of a budget: what it carries, and how much of its share it could use."""

    def __init__(self) -> None:
        self.is_busy = self.is_full = False
        self.carried_bytes_per_second = self.lost_bytes_per_second = 0.0
        self.wants_bytes_per_second = inf
        self.share = inf
        self._uses: deque[tuple[float, Use]] = deque()
        self._used_at = -inf  # when it was idle last, or used its share

    def hear(self, use: Use, *, now: float) -> None:
        self._uses.append((now, use))
        while len(self._uses) > 2 and now - self._uses[1][0] >= WINDOW_SECONDS:
            self._uses.popleft()
        began, first = self._uses[0]
        seconds = max(now - began, WINDOW_SECONDS)
        self.carried_bytes_per_second = (use.delivered_bytes - first.delivered_bytes) / seconds
        self.lost_bytes_per_second = (use.retransmitted_bytes - first.retransmitted_bytes) / seconds
        if not self.is_busy or self.carried_bytes_per_second >= UNUSED_RATIO * self.share:
            self._used_at = now
        self.is_busy, self.is_full = use.is_busy, use.is_full
        is_held_up = use.is_full and now - self._used_at < SLOW_SECONDS
        self.wants_bytes_per_second = inf if is_held_up else self.carried_bytes_per_second / UNUSED_RATIO


def fair_shares(total: float, demands: Mapping[T, float]) -> dict[T, float]:
    """Max-min fair: who wants less than an equal share gets that, the others divide the rest equally."""
    shares: dict[T, float] = {}
    left = total
    waiting = sorted(demands, key=demands.__getitem__)
    for number, name in enumerate(waiting):
        shares[name] = min(demands[name], left / (len(waiting) - number))
        left -= shares[name]
    return shares


class RateBudget:
    """Called by the links' own threads. A link that has just become busy has its share at its next call."""

    def __init__(self, bytes_per_second: float) -> None:
        """`bytes_per_second` 0: what the way that the links share carries without loss, as they find out."""
        self._bytes_per_second = bytes_per_second
        self._learned = LearnedRate()
        self._lock = threading.Lock()
        self._members: dict[Hashable, _Member] = {}

    @property
    def bytes_per_second(self) -> float:
        """The limit at present; infinity: there is none."""
        return self._bytes_per_second or self._learned.bytes_per_second

    def share(self, link: Hashable, use: Use, *, now: float) -> float:
        """What this link may send a second from here on, 0: as much as it can.

        What nobody uses is for those that could. Whoever begins has an equal share, idle or not, and the others make room.
        """
        with self._lock:
            member = self._members.setdefault(link, _Member())
            member.hear(use, now=now)
            if not self._bytes_per_second and use.is_busy:
                self._learn(now)
            member.share = self._share_of(link, member)
            return 0.0 if isinf(member.share) else member.share

    def _share_of(self, link: Hashable, member: _Member) -> float:
        total = self.bytes_per_second
        if isinf(total):
            return inf
        wanted = {name: its.wants_bytes_per_second for name, its in self._members.items() if its.is_busy}
        wanted[link] = inf
        return min(fair_shares(total, wanted)[link], max(total / len(wanted), member.wants_bytes_per_second))

    def _learn(self, now: float) -> None:
        busy = [its for its in self._members.values() if its.is_busy]
        if any(its.is_full for its in busy):
            self._learned.observe(
                now,
                carried=sum(its.carried_bytes_per_second for its in busy),
                lost=sum(its.lost_bytes_per_second for its in busy),
            )

    def forget(self, link: Hashable) -> None:
        """A link is closed."""
        with self._lock:
            self._members.pop(link, None)
