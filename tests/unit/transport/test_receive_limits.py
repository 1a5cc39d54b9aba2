"""Receive limits: the rates that peers are told, over socket pairs."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from prfaas.transport.congestion.rate_budget import RateBudget
from prfaas.transport.net.connection import Connection
from prfaas.transport.net.handshake import CAPABILITIES
from prfaas.transport.protocol.wire import HEADER_BYTES, ConnectionState, FrameType, Header
from prfaas.transport.receiver.limits import BUSY_SECONDS, ReceiveLimits

LIMIT = 8e6
STEP = 0.1  # Seconds between two ticks.


class Ends:
    """Limits that peers whose names begin with "t" share, and the rates that these are told."""

    def __init__(self) -> None:
        budget = RateBudget(LIMIT)
        self.limits = ReceiveLimits(lambda peer: (budget,) if peer.startswith("t") else ())
        self.now = 0.0
        self._sockets: list[socket.socket] = []
        self._connections: list[Connection] = []

    def join(self, peer: str, capabilities: tuple[str, ...] = CAPABILITIES) -> tuple[Connection, socket.socket]:
        near, far = socket.socketpair()
        far.setblocking(False)
        self._sockets.append(far)
        self._connections.append(Connection(near, state=ConnectionState.RECEIVING))
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


@pytest.mark.parametrize(("peer", "capabilities"), [("tokyo-1", ("lz4",)), ("osaka-1", CAPABILITIES)])
def test_a_peer_without_limit_or_capability_is_told_nothing(
    ends: Ends, peer: str, capabilities: tuple[str, ...]
) -> None:
    connection, far = ends.join(peer, capabilities)
    ends.advance(1.0, **{peer: 2 * LIMIT})
    assert _told(far) == []
    ends.limits.disconnected(connection, peer)
