"""Rate budgets: limits that several links share (pure, with the time passed in)."""

import threading
from collections import deque
from collections.abc import Hashable, Mapping
from math import inf
from typing import NamedTuple, TypeVar

USAGE_SECONDS = 1.0  # Usage is averaged over this time, since layers leave in bursts as prefill finishes them.
UNUSED_RATIO = 0.8  # A full link that carries less than this part of its share leaves the rest to others.
SLOW_SECONDS = 2.0  # A link that has just begun to send is still finding its rate.
K = TypeVar("K", bound=Hashable)


class LinkUsage(NamedTuple):
    """Use that one link makes of a budget."""

    is_busy: bool  # Transfers are in progress.
    is_full: bool  # More bytes wait than the link carries.
    delivered_bytes: int  # Total since the link's start.


class _BudgetLink:
    """One link that shares a budget, with its recent use."""

    def __init__(self) -> None:
        self.is_busy = False
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
        carried_bytes_per_second = (usage.delivered_bytes - first.delivered_bytes) / seconds
        if not self.is_busy or carried_bytes_per_second >= UNUSED_RATIO * self.share:
            self._used_at = now
        self.is_busy = usage.is_busy
        is_held_up = usage.is_full and now - self._used_at < SLOW_SECONDS
        self.wanted_bytes_per_second = inf if is_held_up else carried_bytes_per_second / UNUSED_RATIO


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
        self.bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._members: dict[Hashable, _BudgetLink] = {}

    def share(self, link: Hashable, usage: LinkUsage, *, now: float) -> float:
        """Return the bytes per second that a link may send from now on; infinity without a limit.

        Links that can use more divide what others leave unused. A link that starts has an equal share at its next call.
        """
        with self._lock:
            member = self._members.setdefault(link, _BudgetLink())
            member.observe(usage, now=now)
            member.share = self._share_of(link, member)
            return member.share

    def _share_of(self, link: Hashable, member: _BudgetLink) -> float:
        total = self.bytes_per_second
        if total == inf:
            return inf
        wanted = {name: member.wanted_bytes_per_second for name, member in self._members.items() if member.is_busy}
        wanted[link] = inf
        return min(fair_shares(total, wanted)[link], max(total / len(wanted), member.wanted_bytes_per_second))

    def forget(self, link: Hashable) -> None:
        """Remove a closed link."""
        with self._lock:
            self._members.pop(link, None)
