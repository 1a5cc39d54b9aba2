"""Receive limits: each peer gets its share of the ingress limits in RATE frames."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Collection, Iterable

from prfaas.transport.congestion.rate_budget import LinkUsage, RateBudget
from prfaas.transport.net.connection import Connection
from prfaas.transport.net.handshake import RATE
from prfaas.transport.protocol.wire import FrameType, Header

BUSY_SECONDS = 1.0  # A peer counts as sending for so long after its latest chunk.
CHANGE_RATIO = 0.02  # Smaller changes of a share are not sent.


class _LimitedPeer:
    """Connections of one peer, with the rate last sent on each, and the bytes received."""

    def __init__(self, budgets: tuple[RateBudget, ...]) -> None:
        self.budgets = budgets
        self.told: dict[Connection, float] = {}
        self.num_bytes = 0
        self._seen_bytes, self._seen_at = 0, -math.inf

    def use(self, now: float) -> LinkUsage:
        if self.num_bytes > self._seen_bytes:
            self._seen_bytes, self._seen_at = self.num_bytes, now
        is_busy = now - self._seen_at < BUSY_SECONDS
        return LinkUsage(is_busy, is_busy, self.num_bytes)


class ReceiveLimits:
    """Divides receive limits among the peers that send. Any thread may call it."""

    def __init__(self, budgets_of: Callable[[str], tuple[RateBudget, ...]] = lambda peer: ()) -> None:
        """`budgets_of` returns the limits that hold for a peer, alone or together with others."""
        self._budgets_of = budgets_of
        self._sending = threading.Lock()  # Rates are sent in the order in which they are computed.
        self._lock = threading.Lock()
        self._peers: dict[str, _LimitedPeer] = {}

    def connected(self, connection: Connection, peer: str, capabilities: Collection[str], *, now: float) -> None:
        """Tell a new connection its peer's rate; `disconnected` follows. A peer that does not obey RATE has no limit."""
        if RATE not in capabilities:
            return
        with self._lock:
            if peer not in self._peers:
                budgets = self._budgets_of(peer)
                if not budgets:
                    return
                self._peers[peer] = _LimitedPeer(budgets)
            self._peers[peer].told[connection] = 0.0
        self._update([peer], now)  # The shares of other peers do not change before this one sends.

    def disconnected(self, connection: Connection, peer: str) -> None:
        """Forget a connection; without any the peer leaves its share to others."""
        with self._lock:
            limited = self._peers.get(peer)
            if limited is None:
                return
            limited.told.pop(connection, None)
            if not limited.told:
                del self._peers[peer]
                for budget in limited.budgets:
                    budget.forget(peer)

    def received(self, peer: str, num_bytes: int) -> None:
        """Count bytes of a peer. Peers without a limit cost no lock."""
        if peer in self._peers:
            with self._lock:
                if limited := self._peers.get(peer):
                    limited.num_bytes += num_bytes

    def tick(self, now: float) -> None:
        """Tell every peer whose share has changed its new rate. `now` is monotonic seconds."""
        with self._lock:
            peers = list(self._peers)
        self._update(peers, now)

    def _update(self, peers: Iterable[str], now: float) -> None:
        with self._sending:
            with self._lock:
                changes = [
                    (limited, connection, rate)
                    for peer in peers
                    if (limited := self._peers.get(peer))
                    for rate in [min(budget.share(peer, limited.use(now), now=now) for budget in limited.budgets)]
                    for connection, told in limited.told.items()
                    if not math.isclose(told, rate, rel_tol=CHANGE_RATIO)
                ]
            for limited, connection, rate in changes:
                frame = Header(FrameType.RATE, 0, offset=max(1, int(rate))).encode()
                with contextlib.suppress(OSError):
                    if connection.write_at_once(frame):
                        with self._lock:
                            if connection in limited.told:
                                limited.told[connection] = rate
