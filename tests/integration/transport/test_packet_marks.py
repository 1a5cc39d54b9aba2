"""DSCP of the packets of a link, by class of priority."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

import pytest

from prfaas.transport.net.sockets import BACKGROUND_PRIORITY, PacketMarks
from tests.support.transport_ends import Near, make_far, objects_of, send
from tests.support.waiting import wait_until

INTERACTIVE, BACKGROUND = 34, 10
MARKS = PacketMarks(INTERACTIVE, BACKGROUND)
ALL_IPV4 = 0x0800  # ETH_P_IP
IP_OPTIONS = {
    "127.0.0.1:0": (socket.IPPROTO_IP, socket.IP_TOS),
    "[::1]:0": (socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
}


def _dscps(near: Near, address: str) -> set[int]:
    """Return the DSCPs of the link's sockets."""
    sockets = [worker.connection._socket for worker in near.link._workers]
    return {sock.getsockopt(*IP_OPTIONS[address]) >> 2 for sock in sockets}


@pytest.mark.parametrize("address", list(IP_OPTIONS))
def test_sockets_have_the_mark_of_the_transfer_that_they_carry(address: str, near_to: Callable[..., Near]) -> None:
    far = make_far(listen=address)
    near = near_to(far.address, num_connections=1, marks=MARKS)
    for priority, dscp in ((BACKGROUND_PRIORITY, BACKGROUND), (BACKGROUND_PRIORITY - 1, INTERACTIVE)):
        near.assert_completed(send(near, objects_of(1 << 16), priority=priority))
        wait_until(lambda dscp=dscp: _dscps(near, address) == {dscp})  # type: ignore[misc]
    near.link.close()
    far.receiver.close()


def test_packets_are_unmarked_by_default(near_to: Callable[..., Near]) -> None:
    far = make_far()
    near = near_to(far.address)
    near.assert_completed(send(near, objects_of(10)))
    assert _dscps(near, "127.0.0.1:0") == {0}
    near.link.close()
    far.receiver.close()


@pytest.fixture
def capture() -> Iterator[socket.socket]:
    if os.geteuid() != 0:
        pytest.skip("a packet capture needs root")
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ALL_IPV4)) as found:
        found.bind(("lo", ALL_IPV4))
        found.setblocking(False)
        yield found


def _captured(capture: socket.socket, port: int) -> tuple[set[int], set[int]]:
    """Return the DSCPs of the captured packets with data to a port of TCP, and of those from it."""
    to_port, from_port = set[int](), set[int]()
    while True:
        try:
            packet = capture.recv(1 << 16)
        except BlockingIOError:
            return to_port, from_port
        tcp = packet[(packet[0] & 0xF) * 4 :]
        if packet[9] != socket.IPPROTO_TCP or len(tcp) <= (tcp[12] >> 4) * 4:
            continue
        if int.from_bytes(tcp[2:4], "big") == port:
            to_port.add(packet[1] >> 2)
        elif int.from_bytes(tcp[:2], "big") == port:
            from_port.add(packet[1] >> 2)


@pytest.mark.root
def test_captured_packets_carry_the_marks_of_both_ends(near_to: Callable[..., Near], capture: socket.socket) -> None:
    far = make_far(marks=MARKS)
    port = int(far.address.rpartition(":")[2])
    near = near_to(far.address, num_connections=1, marks=MARKS)
    near.assert_completed(send(near, objects_of(1 << 20), priority=BACKGROUND_PRIORITY))
    near.assert_completed(send(near, objects_of(10), priority=0))
    near.link.close()
    far.receiver.close()
    assert _captured(capture, port) == ({INTERACTIVE, BACKGROUND}, {INTERACTIVE})
