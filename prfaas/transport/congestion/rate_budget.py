"""What several links may send together before the way that they share loses bytes, learned from what it loses (pure).

BBR looks for a higher rate all the time, each connection for itself: many of them before one shallow queue overflow it
together, for good, and what is sent again is egress that carries nothing. Chance loses little: what is lost for seconds on end
is a queue that is too short for so much. Then all may send what arrived meanwhile, and no more. From there the limit rises by
a hundredth every second without such losses, and after ten of these ever faster, for the way may have become wider; it goes
when it is four times what was learned.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Mapping
from math import inf, isinf
from typing import NamedTuple, TypeVar

WATCH_SECONDS = 1.0
OVERFLOW_RATIO = 0.03  # of the bytes sent: more is no chance
OVERFLOW_WINDOWS = 3  # in a row: a link that has just become slower loses for one, until BBR has seen it
PROBE_RATIO = 0.01
PATIENT_WINDOWS = 10  # of slow probing, after which the step doubles
FORGET_RATIO = 4.0


class LearnedRateLimit:
    """Takes what all links carry and lose; says what they may send, infinity while nothing speaks for a limit."""

    def __init__(self) -> None:
        self.bytes_per_second = inf
        self._learned = 0.0
        self._num_bad, self._num_good = 0, 0
        self._window_began = self._last_at = -inf
        self._carried_bytes, self._lost_bytes = 0.0, 0.0

    def observe(self, now: float, *, carried: float, lost: float) -> None:
        """Bytes a second that arrive at present and that are sent again; only while more waits to be sent.

        Samples come from several threads: one that is older than the last is left out.
        """
        if now - self._last_at > WATCH_SECONDS:
            self._begin(now)
        if now <= self._last_at:
            return
        seconds, self._last_at = now - self._last_at, now
        self._carried_bytes += carried * seconds
        self._lost_bytes += lost * seconds
        if now - self._window_began >= WATCH_SECONDS:
            self._end(now - self._window_began)
            self._begin(now)

    def _begin(self, now: float) -> None:
        self._window_began = self._last_at = now
        self._carried_bytes = self._lost_bytes = 0.0

    def _end(self, seconds: float) -> None:
        is_bad = self._lost_bytes > OVERFLOW_RATIO * (self._carried_bytes + self._lost_bytes)
        self._num_bad, self._num_good = (self._num_bad + 1, 0) if is_bad else (0, self._num_good + 1)
        if self._num_bad >= OVERFLOW_WINDOWS:
            self.bytes_per_second = self._learned = self._carried_bytes / seconds
        elif self._num_good and self.bytes_per_second < inf:
            self.bytes_per_second *= 1 + PROBE_RATIO * 2 ** max(0, self._num_good - PATIENT_WINDOWS)
            if self.bytes_per_second > FORGET_RATIO * self._learned:
                self.bytes_per_second = inf


WINDOW_SECONDS = 1.0  # over which what a link carries is counted: layers leave in bursts, as prefill finishes them
# A full link that carries less than this of its share leaves the rest to others, with some room to grow.
UNUSED_RATIO = 0.8
SLOW_SECONDS = 2.0  # for so long: one that has just begun to send is still finding its rate
T = TypeVar("T")


class LinkUsage(NamedTuple):
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
        self._uses: deque[tuple[float, LinkUsage]] = deque()
        self._used_at = -inf  # when it was idle last, or used its share

    def hear(self, use: LinkUsage, *, now: float) -> None:
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
        self._learned = LearnedRateLimit()
        self._lock = threading.Lock()
        self._members: dict[Hashable, _Member] = {}

    @property
    def bytes_per_second(self) -> float:
        """The limit at present; infinity: there is none."""
        return self._bytes_per_second or self._learned.bytes_per_second

    def share(self, link: Hashable, use: LinkUsage, *, now: float) -> float:
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
        busy = [member for member in self._members.values() if member.is_busy]
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
