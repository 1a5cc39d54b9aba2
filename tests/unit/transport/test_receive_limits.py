"""Receive limits: the rates that peers are told, over socket pairs."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Hashable, Iterator

import pytest

from prfaas.transport.congestion.rate_budget import LinkUsage, RateBudget
from prfaas.transport.net.connection import Connection
from prfaas.transport.net.handshake import CAPABILITIES
from prfaas.transport.protocol.wire import HEADER_BYTES, ConnectionState, FrameType, Header
from prfaas.transport.receiver.limits import BUSY_SECONDS, CHANGE_RATIO, ReceiveLimits
from tests.support.waiting import PATIENCE_SECONDS

LIMIT = 8e6
STEP = 0.1  # Seconds between two ticks.


class SlowConnection(Connection):
    """Connection whose write lets another thread run first."""

    meanwhile: threading.Thread | None = None

    def write_at_once(self, frame: bytes) -> bool:
        thread, self.meanwhile = self.meanwhile, None
        if thread is not None:
            thread.start()
            thread.join(0.2)
        return super().write_at_once(frame)


class CountingBudget(RateBudget):
    """Budget that counts computed shares, as each takes longer the more members there are."""

    num_shares = 0

    def share(self, link: Hashable, use: LinkUsage, *, now: float) -> float:
        self.num_shares += 1
        return super().share(link, use, now=now)


class Ends:
    """Limits that peers whose names begin with "t" share, and the rates that these are told."""

    def __init__(self) -> None:
        self.budget = budget = CountingBudget(LIMIT)
        self.limits = ReceiveLimits(lambda peer: (budget,) if peer.startswith("t") else ())
        self.now = 0.0
        self._sockets: list[socket.socket] = []
        self._connections: list[Connection] = []

    def join(
        self, peer: str, capabilities: tuple[str, ...] = CAPABILITIES, *, make: Callable[..., Connection] = Connection
    ) -> tuple[Connection, socket.socket]:
        near, far = socket.socketpair()
        far.setblocking(False)
        self._sockets.append(far)
        self._connections.append(make(near, state=ConnectionState.RECEIVING))
        self.limits.connected(self._connections[-1], peer, capabilities, now=self.now)
        return self._connections[-1], far

    def advance(self, seconds: float, **bytes_per_second: float) -> None:
        """Let time pass in which each peer sends so much."""
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            for peer, rate in bytes_per_second.items():
                self.limits.received(peer, int(rate * STEP))
            self.limits.tick(self.now)

    def close(self) -> None:
        for connection, far in zip(self._connections, self._sockets, strict=True):
            connection.close()
            far.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def _told(far: socket.socket) -> list[int]:
    """Return the rates that a peer has been told on a connection."""
    received = b""
    try:
        while True:
            received += far.recv(1 << 16)
    except BlockingIOError:
        headers = [Header.decode(received[at : at + HEADER_BYTES]) for at in range(0, len(received), HEADER_BYTES)]
    assert {header.type for header in headers} <= {FrameType.RATE}
    return [header.offset for header in headers]


def test_a_peer_is_told_its_share_with_each_connection_and_on_change(ends: Ends) -> None:
    first = [ends.join("tokyo-1")[1] for _ in range(2)]
    _, second = ends.join("tokyo-2")
    assert [_told(peer) for peer in (*first, second)] == [[LIMIT]] * 3, "nobody sends"
    ends.advance(1.0, **{"tokyo-1": LIMIT})
    assert [_told(peer) for peer in (*first, second)] == [[], [], [LIMIT / 2]]
    ends.advance(1.0, **{"tokyo-1": LIMIT, "tokyo-2": LIMIT / 2})
    assert [_told(peer)[-1] for peer in first] == [LIMIT / 2] * 2 and _told(second) == []
    ends.advance(2 * BUSY_SECONDS, **{"tokyo-1": LIMIT / 2})
    assert [_told(peer)[-1] for peer in first] == [LIMIT] * 2 and _told(second) == []


def test_an_unused_share_goes_to_other_peers(ends: Ends) -> None:
    (_, slow), (_, fast) = ends.join("tokyo-1"), ends.join("tokyo-2")
    ends.advance(5.0, **{"tokyo-1": LIMIT / 8, "tokyo-2": LIMIT / 2})
    assert _told(slow)[-1] == LIMIT / 2, "available to it at once"
    assert math.isclose(_told(fast)[-1], LIMIT * (1 - 1 / 8 / 0.8), rel_tol=2 * CHANGE_RATIO)


def test_a_disconnected_peer_leaves_its_share_to_others(ends: Ends) -> None:
    (_, first), (connection, _) = ends.join("tokyo-1"), ends.join("tokyo-2")
    both = {"tokyo-1": LIMIT / 2, "tokyo-2": LIMIT / 2}
    ends.advance(1.0, **both)
    assert _told(first)[-1] == LIMIT / 2
    ends.limits.disconnected(connection, "tokyo-2")
    ends.advance(STEP, **both)
    assert _told(first) == [LIMIT]


def test_a_new_peer_costs_only_the_computation_of_its_own_share(ends: Ends) -> None:
    for number in range(20):
        ends.join(f"tokyo-{number}")
    assert ends.budget.num_shares == 20


def test_rates_are_sent_in_the_order_in_which_they_are_computed(ends: Ends) -> None:
    connection, far = ends.join("tokyo-1", make=SlowConnection)
    for number in range(2, 5):
        ends.join(f"tokyo-{number}")
    two, three, four = ({f"tokyo-{number}": LIMIT / 4 for number in range(1, 1 + count)} for count in (2, 3, 4))
    ends.advance(1.0, **two)
    ends.advance(STEP, **three)
    assert isinstance(connection, SlowConnection)
    thread = connection.meanwhile = threading.Thread(target=ends.advance, args=(2 * STEP,), kwargs=four)
    ends.advance(STEP, **three)
    thread.join(PATIENCE_SECONDS)
    assert _told(far)[-2:] == [LIMIT // 3, LIMIT // 4]


@pytest.mark.parametrize(("peer", "capabilities"), [("tokyo-1", ("lz4",)), ("osaka-1", CAPABILITIES)])
def test_a_peer_without_limit_or_capability_is_told_nothing(
    ends: Ends, peer: str, capabilities: tuple[str, ...]
) -> None:
    connection, far = ends.join(peer, capabilities)
    ends.advance(1.0, **{peer: 2 * LIMIT})
    assert _told(far) == []
    ends.limits.disconnected(connection, peer)
