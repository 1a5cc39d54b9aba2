"""Rate budgets: limits that several links share, configured or learned from losses (pure, with the time passed in)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Mapping
from math import inf, isinf
from typing import NamedTuple, TypeVar

from prfaas.transport.congestion.rate_estimator import RETRANSMIT_RATIO

LOSS_WINDOW_SECONDS = 1.0
OVERFLOW_WINDOWS = 3  # A link that has just become slower overflows one window, until BBR adapts.
PROBE_RATIO = 0.01
PATIENT_WINDOWS = 10  # Windows with slow growth of the limit. Then the step doubles each time.
FORGET_RATIO = 4.0
USAGE_SECONDS = 1.0  # Usage is averaged over this time, since layers leave in bursts as prefill finishes them.
UNUSED_RATIO = 0.8  # A full link that carries less than this part of its share leaves the rest to others.
SLOW_SECONDS = 2.0  # A link that has just begun to send is still finding its rate.
K = TypeVar("K", bound=Hashable)


class LearnedRateLimit:
    """Rate limit learned from lasting losses on a path that links share.

    Each BBR connection keeps looking for a higher rate. Many of them overflow a shallow queue together, for good, and
    retransmissions are egress without effect. Random loss is small, so losses that last for seconds show such a queue.
    The limit then becomes the rate at which bytes arrived. It grows by 1 % per second without such losses, and faster
    after ten seconds, since the path may have become wider. At four times the learned rate it is dropped.
    """

    def __init__(self) -> None:
        self.bytes_per_second = inf
        self._learned = 0.0
        self._num_bad, self._num_good = 0, 0
        self._window_began = self._last_at = -inf
        self._carried_bytes, self._lost_bytes = 0.0, 0.0

    def observe(self, now: float, *, carried: float, lost: float) -> None:
        """Take the rates of arriving and of retransmitted bytes. Call only while more waits to be sent.

        Samples come from several threads. A sample older than the latest is dropped.
        """
        if now - self._last_at > LOSS_WINDOW_SECONDS:
            self._begin_window(now)
        if now <= self._last_at:
            return
        seconds, self._last_at = now - self._last_at, now
        self._carried_bytes += carried * seconds
        self._lost_bytes += lost * seconds
        if now - self._window_began >= LOSS_WINDOW_SECONDS:
            self._end_window(now - self._window_began)
            self._begin_window(now)

    def _begin_window(self, now: float) -> None:
        self._window_began = self._last_at = now
        self._carried_bytes = self._lost_bytes = 0.0

    def _end_window(self, seconds: float) -> None:
        is_bad = self._lost_bytes > RETRANSMIT_RATIO * (self._carried_bytes + self._lost_bytes)
        self._num_bad, self._num_good = (self._num_bad + 1, 0) if is_bad else (0, self._num_good + 1)
        if self._num_bad >= OVERFLOW_WINDOWS:
            self.bytes_per_second = self._learned = self._carried_bytes / seconds
        elif self._num_good and self.bytes_per_second < inf:
            self.bytes_per_second *= 1 + PROBE_RATIO * 2 ** max(0, self._num_good - PATIENT_WINDOWS)
            if self.bytes_per_second > FORGET_RATIO * self._learned:
                self.bytes_per_second = inf


class LinkUsage(NamedTuple):
    """Use that one link makes of a budget. Byte counts are totals since the link's start."""

    is_busy: bool  # Transfers are in progress.
    is_full: bool  # More bytes wait than the link carries.
    delivered_bytes: int
    retransmitted_bytes: int


class _BudgetLink:
    """One link that shares a budget, with its recent use."""

    def __init__(self) -> None:
        self.is_busy = self.is_full = False
        self.carried_bytes_per_second = self.lost_bytes_per_second = 0.0
        self.wanted_bytes_per_second = inf
        self.share = inf
        self._usages: deque[tuple[float, LinkUsage]] = deque()
        self._used_at = -inf  # Latest time at which the link was idle or used its share.

    def observe(self, usage: LinkUsage, *, now: float) -> None:
        self._usages.append((now, usage))
        while len(self._usages) > 2 and now - self._usages[1][0] >= USAGE_SECONDS:
            self._usages.popleft()
        began, first = self._usages[0]
        seconds = max(now - began, USAGE_SECONDS)
        self.carried_bytes_per_second = (usage.delivered_bytes - first.delivered_bytes) / seconds
        self.lost_bytes_per_second = (usage.retransmitted_bytes - first.retransmitted_bytes) / seconds
        if not self.is_busy or self.carried_bytes_per_second >= UNUSED_RATIO * self.share:
            self._used_at = now
        self.is_busy, self.is_full = usage.is_busy, usage.is_full
        is_held_up = usage.is_full and now - self._used_at < SLOW_SECONDS
        self.wanted_bytes_per_second = inf if is_held_up else self.carried_bytes_per_second / UNUSED_RATIO


def fair_shares(total: float, demands: Mapping[K, float]) -> dict[K, float]:
    """Divide `total` max-min fairly: small demands are met, and the others divide the rest equally."""
    shares: dict[K, float] = {}
    left = total
    by_demand = sorted(demands, key=demands.__getitem__)
    for number, name in enumerate(by_demand):
        shares[name] = min(demands[name], left / (len(by_demand) - number))
        left -= shares[name]
    return shares


class RateBudget:
    """Rate limit that several links share. Called by the links' own threads."""

    def __init__(self, bytes_per_second: float) -> None:
        """Create a budget; 0 learns the limit from losses."""
        self._bytes_per_second = bytes_per_second
        self._learned = LearnedRateLimit()
        self._lock = threading.Lock()
        self._members: dict[Hashable, _BudgetLink] = {}

    @property
    def bytes_per_second(self) -> float:
        """Present limit; infinity for none."""
        return self._bytes_per_second or self._learned.bytes_per_second

    def share(self, link: Hashable, usage: LinkUsage, *, now: float) -> float:
        """Return the bytes per second that a link may send from now on; 0 for no limit.

        Links that can use more divide what others leave unused. A link that starts has an equal share at its next call.
        """
        with self._lock:
            member = self._members.setdefault(link, _BudgetLink())
            member.observe(usage, now=now)
            if not self._bytes_per_second and usage.is_busy:
                self._learn(now)
            member.share = self._share_of(link, member)
            return 0.0 if isinf(member.share) else member.share

    def _share_of(self, link: Hashable, member: _BudgetLink) -> float:
        total = self.bytes_per_second
        if isinf(total):
            return inf
        wanted = {name: member.wanted_bytes_per_second for name, member in self._members.items() if member.is_busy}
        wanted[link] = inf
        return min(fair_shares(total, wanted)[link], max(total / len(wanted), member.wanted_bytes_per_second))

    def _learn(self, now: float) -> None:
        busy = [member for member in self._members.values() if member.is_busy]
        if any(member.is_full for member in busy):
            self._learned.observe(
                now,
                carried=sum(member.carried_bytes_per_second for member in busy),
                lost=sum(member.lost_bytes_per_second for member in busy),
            )

    def forget(self, link: Hashable) -> None:
        """Remove a closed link."""
        with self._lock:
            self._members.pop(link, None)
