"""Receive limits: rates are told to peers that have a limit and obey it."""

from __future__ import annotations

import socket

import pytest

from prfaas.transport.congestion.rate_budget import RateBudget
from prfaas.transport.net.connection import Connection
from prfaas.transport.net.handshake import CAPABILITIES
from prfaas.transport.protocol.wire import HEADER_BYTES, ConnectionState, FrameType, Header
from prfaas.transport.receiver.limits import ReceiveLimits

LIMIT = 8e6


@pytest.mark.parametrize(
    ("peer", "capabilities", "is_told"),
    [("tokyo-1", CAPABILITIES, True), ("tokyo-1", ("lz4",), False), ("osaka-1", CAPABILITIES, False)],
    ids=["limit", "does not obey", "no limit"],
)
def test_only_a_peer_with_limit_and_capability_is_told_its_rate(
    peer: str, capabilities: tuple[str, ...], is_told: bool
) -> None:
    limits = ReceiveLimits(lambda peer: (RateBudget(LIMIT),) if peer.startswith("t") else ())
    near, far = socket.socketpair()
    connection = Connection(near, state=ConnectionState.RECEIVING)
    limits.connected(connection, peer, capabilities, now=0.0)
    limits.received(peer, int(2 * LIMIT))
    limits.tick(1.0)
    limits.disconnected(connection, peer)
    connection.close()
    with far:
        told = far.recv(1 << 16)
    assert len(told) == (HEADER_BYTES if is_told else 0)
    if is_told:
        header = Header.decode(told)
        assert (header.type, header.offset) == (FrameType.RATE, LIMIT)
