"""DSCP of the packets of a link, by class of priority."""

import socket
from collections.abc import Callable, Iterable

import pytest

from prfaas.transport.net.connection import Connection
from prfaas.transport.net.sockets import BACKGROUND_PRIORITY, PacketMarks
from tests.support.transport_ends import Near, make_far, objects_of, send
from tests.support.waiting import wait_until

INTERACTIVE, BACKGROUND = 34, 10
MARKS = PacketMarks(interactive=INTERACTIVE, background=BACKGROUND)
IP_OPTIONS = {"127.0.0.1:0": (socket.IPPROTO_IP, socket.IP_TOS), "[::1]:0": (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)}


def _connections(near: Near) -> list[Connection]:
    return [worker.connection for worker in near.link._workers]


def _dscps(address: str, connections: Iterable[Connection]) -> set[int]:
    """Return the DSCPs of the sockets of these connections."""
    return {connection._socket.getsockopt(*IP_OPTIONS[address]) >> 2 for connection in connections}


@pytest.mark.parametrize("address", list(IP_OPTIONS))
def test_sockets_have_the_mark_of_the_transfer_that_they_carry(address: str, near_to: Callable[..., Near]) -> None:
    far = make_far(listen=address, marks=MARKS)
    near = near_to(far.address, num_connections=1, marks=MARKS)
    for priority, dscp in ((BACKGROUND_PRIORITY, BACKGROUND), (BACKGROUND_PRIORITY - 1, INTERACTIVE)):
        near.assert_completed(send(near, objects_of(1 << 16), priority=priority))
        wait_until(lambda dscp=dscp: _dscps(address, _connections(near)) == {dscp})  # type: ignore[misc]
    assert _dscps(address, far.receiver._connections) == {INTERACTIVE}
    near.link.close()
    far.receiver.close()


def test_packets_are_unmarked_by_default(near_to: Callable[..., Near]) -> None:
    far = make_far()
    near = near_to(far.address)
    near.assert_completed(send(near, objects_of(10)))
    assert _dscps("127.0.0.1:0", _connections(near)) == {0}
    near.link.close()
    far.receiver.close()
