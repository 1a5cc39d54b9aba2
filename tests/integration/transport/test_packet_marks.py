"""DSCP of the packets of a link, by class of priority."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from prfaas.transport.net.sockets import BACKGROUND_PRIORITY, PacketMarks
from tests.support.transport_ends import Near, make_far, objects_of, send
from tests.support.waiting import wait_until

INTERACTIVE, BACKGROUND = 34, 10
MARKS = PacketMarks(interactive=INTERACTIVE, background=BACKGROUND)
ALL_IPV4, SO_ATTACH_FILTER = 0x0800, 26  # ETH_P_IP
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


def _port_filter(port: int) -> list[tuple[int, int, int, int]]:
    """Return a BPF program that keeps the packets from or to a port of TCP."""
    return [
        (0xB1, 0, 0, 0),  # X = length of the IP header
        (0x48, 0, 0, 0),  # A = source port
        (0x15, 2, 0, port),
        (0x48, 0, 0, 2),  # A = destination port
        (0x15, 0, 1, port),
        (0x06, 0, 0, 0xFFFF),
        (0x06, 0, 0, 0),
    ]


@contextlib.contextmanager
def _capture(port: int) -> Iterator[socket.socket]:
    """Capture the packets of one port on loopback, where other programs send too."""
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in _port_filter(port))
    kept = ctypes.create_string_buffer(program, len(program))
    attached = struct.pack("HL", len(program) // 8, ctypes.addressof(kept))
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ALL_IPV4)) as capture:
        capture.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, attached)
        capture.bind(("lo", ALL_IPV4))
        capture.setblocking(False)
        yield capture


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
@pytest.mark.skipif(os.geteuid() != 0, reason="a packet capture needs root")
def test_captured_packets_carry_the_marks_of_both_ends(near_to: Callable[..., Near]) -> None:
    far = make_far(marks=MARKS)
    port = int(far.address.rpartition(":")[2])
    with _capture(port) as capture:
        near = near_to(far.address, num_connections=1, marks=MARKS)
        near.assert_completed(send(near, objects_of(1 << 14), priority=BACKGROUND_PRIORITY))
        near.assert_completed(send(near, objects_of(10), priority=0))
        near.link.close()
        far.receiver.close()
        assert _captured(capture, port) == ({INTERACTIVE, BACKGROUND}, {INTERACTIVE})
