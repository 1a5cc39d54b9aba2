"""What peers may send to this end together: each is told its share of the limits that hold for it (RATE)."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable

from prfaas.transport.congestion.rate_budget import LinkUsage, RateBudget
from prfaas.transport.net.connection import Connection
from prfaas.transport.net.handshake import RATE
from prfaas.transport.protocol.wire import FrameType, Header
from prfaas.transport.receiver.transfer import say_at_once

BUSY_SECONDS = 1.0  # a peer counts as sending for so long after its latest chunk
TELL_RATIO = 0.02  # smaller changes of a share are not told


class _Peer:
    """One peer: its connections, what each was told last, and how much has come over all of them."""

    def __init__(self) -> None:
        self.told: dict[Connection, float] = {}
        self.num_bytes = self._seen_bytes = 0
        self._came_at = -math.inf

    def use(self, now: float) -> LinkUsage:
        if self.num_bytes > self._seen_bytes:
            self._seen_bytes, self._came_at = self.num_bytes, now
        is_busy = now - self._came_at < BUSY_SECONDS
        return LinkUsage(is_busy, is_busy, self.num_bytes, 0)


class ReceiveLimits:
    """Called from the threads that read connections and from the one that watches them."""

    def __init__(self, budgets_of: Callable[[str], tuple[RateBudget, ...]]) -> None:
        """`budgets_of(peer)`: the limits that hold for a peer, over what it sends alone or with others."""
        self._budgets_of = budgets_of
        self._telling = threading.Lock()  # what is reckoned last is heard last
        self._lock = threading.Lock()
        self._budgets: dict[str, tuple[RateBudget, ...]] = {}
        self._peers: dict[str, _Peer] = {}

    def joined(self, connection: Connection, peer: str, capabilities: Collection[str], *, now: float) -> None:
        """A peer has one more connection, and hears what it may send; `left` follows."""
        if RATE not in capabilities:  # an agent that does not know of limits
            return
        with self._lock:
            if peer not in self._peers:
                budgets = self._budgets_of(peer)
                if not budgets:
                    return
                self._peers[peer], self._budgets[peer] = _Peer(), budgets
            self._peers[peer].told[connection] = 0.0
        self._tell([peer], now)  # of the others nothing changes before it sends

    def left(self, connection: Connection, peer: str) -> None:
        """A connection is gone."""
        with self._lock:
            its = self._peers.get(peer)
            if its is None:
                return
            its.told.pop(connection, None)
            if not its.told:
                del self._peers[peer]
                for budget in self._budgets.pop(peer):
                    budget.forget(peer)

    def came(self, peer: str, num_bytes: int) -> None:
        """So much has come from a peer; of one without a limit nothing is counted, and no chunk of it takes the lock."""
        if peer in self._peers:
            with self._lock:
                if its := self._peers.get(peer):
                    its.num_bytes += num_bytes

    def tell(self, now: float) -> None:
        """Have each peer send no faster than its share; `now` is monotonic seconds."""
        with self._lock:
            peers = list(self._peers)
        self._tell(peers, now)

    def _tell(self, peers: Iterable[str], now: float) -> None:
        with self._telling:
            with self._lock:
                rates = [(its, self._share(peer, its, now)) for peer in peers if (its := self._peers.get(peer))]
                unheard = [
                    (its, connection, rate)
                    for its, rate in rates
                    for connection, told in its.told.items()
                    if not math.isclose(told, rate, rel_tol=TELL_RATIO)
                ]
            for its, connection, rate in unheard:
                frame = Header(FrameType.RATE, 0, offset=max(1, int(rate))).encode()
                if say_at_once(connection, frame) == "said":
                    with self._lock:
                        if connection in its.told:
                            its.told[connection] = rate

    def _share(self, peer: str, its: _Peer, now: float) -> float:
        use = its.use(now)
        return min(budget.share(peer, use, now=now) for budget in self._budgets[peer])
