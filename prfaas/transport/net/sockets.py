"""Sockets of the wire: dialled, listening, tuned, read and written, and what the kernel reports of them (Linux)."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prfaas.config import setting
from prfaas.errors import ConfigError
from prfaas.transport.congestion.connection_policy import NOT_SENT_LOW_WATER_BYTES
from prfaas.transport.ranges import bytes_after, first_bytes
from prfaas.units import is_public, split_address

CONNECT_SECONDS = 5.0
SEND_SECONDS = 10.0  # A peer that reads nothing for so long counts as lost.
SEND_BUFFER_BYTES = 4 << 20  # Measured: 1.9 times the default's bytes in flight over 30 ms.
BACKGROUND_PRIORITY = 4  # Requests have 3 unless they ask for another priority, and prefix copies have 4.
RECEIVE_STEP_BYTES = 256 << 10  # A reader is woken for so many bytes of a chunk, not for each packet.


@dataclass(frozen=True)
class PacketMarks:
    """Settings for the DSCP of packets (RFC 2474) by class of priority; 0 leaves packets unmarked."""

    interactive: int = setting("count", default=0, maximum=63, doc="Of requests, such as 34 (AF41).")
    background: int = setting(
        "count", default=0, maximum=63, doc="Of prefix copies and of requests with less priority, such as 10 (AF11)."
    )

    def of(self, priority: int) -> int:
        """Return the DSCP of a transfer with this wire priority."""
        return self.background if priority >= BACKGROUND_PRIORITY else self.interactive


UNMARKED = PacketMarks()


def make_socket(address: str, *, congestion_control: str, allow_public: bool) -> socket.socket:
    """Connect to an address and tune the socket.

    Raises:
        ConfigError: the address is malformed, or public without `allow_public`.
        OSError: nobody answers.
    """
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise ConfigError(f"{address!r} is {error}") from error
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if not allow_public and any(is_public(str(address[0])) for *_, address in found):
        raise ConfigError(f"{host} is public; set tls, or set insecure_plaintext: true to send KV there unencrypted")
    made = _connect(found)
    try:
        tune(made, congestion_control=congestion_control)
    except OSError:
        made.close()
        raise
    return made


def _connect(found: Iterable[tuple[int, int, int, str, Any]]) -> socket.socket:
    """Connect to the first of these addresses that answers.

    The name is not looked up again: a later answer may be an address that is not allowed.

    Raises:
        OSError: none answers.
    """
    failure = OSError("the name has no address")
    for family, kind, protocol, _, address in found:
        try:
            made = socket.socket(family, kind, protocol)
        except OSError as error:  # The machine may lack the address family.
            failure = error
            continue
        try:
            made.settimeout(CONNECT_SECONDS)
            made.connect(address)
            return made
        except OSError as error:
            made.close()
            failure = error
    raise failure


def listen(address: str, *, allow_public: bool) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: the address is taken, or public without `allow_public`.
    """
    host, port = split_address(address)
    try:
        if not allow_public and (public := public_address(host)):
            raise ConfigError(
                f"listen: {public} is not a private address; KV would cross it unencrypted. "
                "Set tls, listen on a private address, or set insecure_plaintext: true"
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"listen: {address} cannot be bound ({error.strerror})") from error


def public_address(host: str) -> str | None:
    """Return the host if any of its addresses is public; binding to all addresses counts as public."""
    found = socket.getaddrinfo(host, None)
    return host if any(is_public(str(address[0])) for *_, address in found) else None


def tune(connection: socket.socket, *, congestion_control: str) -> None:
    """Set the options that a long link needs. Optional ones keep the kernel's default where it refuses them.

    SO_RCVBUF stays unset, because setting it ends the kernel's own tuning, which reaches further.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_SECONDS * 1000))
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_LOW_WATER_BYTES)


def mark(connection: socket.socket, dscp: int) -> None:
    """Mark the packets that leave from now on, those of bytes in the send buffer included."""
    traffic_class = dscp << 2  # The lowest two bits are ECN's.
    if connection.family == socket.AF_INET6:
        connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, traffic_class)
    connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, traffic_class)


class PlainStream:
    """Unencrypted bytes over a blocking socket, one complete chunk per call, with the kernel's time-outs."""

    is_worn = is_worn_out = False

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, buffers: Sequence[bytes | memoryview], *, within_seconds: float) -> None:
        """Send all buffers."""
        left, deadline = sum(map(len, buffers)), time.monotonic() + within_seconds
        while left:
            sent = self._socket.sendmsg(buffers)
            left -= sent
            if left:
                if time.monotonic() > deadline:
                    raise TimeoutError("the peer takes a frame too slowly")
                buffers = bytes_after(buffers, sent)

    def receive(self, views: Sequence[memoryview], *, within_seconds: float) -> None:
        """Fill all views."""
        total, deadline = sum(map(len, views)), time.monotonic() + within_seconds
        if total >= 2 * RECEIVE_STEP_BYTES:
            # The last step is excepted, because nothing may follow it that would wake the reader.
            steps = total - RECEIVE_STEP_BYTES
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, RECEIVE_STEP_BYTES)
            self._fill(first_bytes(views, steps), deadline)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            views = bytes_after(views, steps)
        self._fill(views, deadline)

    def _fill(self, views: Sequence[memoryview], deadline: float) -> None:
        left = sum(map(len, views))
        while left:
            got = self._receive(views)
            left -= got
            if left:
                if time.monotonic() > deadline:
                    raise TimeoutError("the peer sends a frame too slowly")
                views = bytes_after(views, got)

    def _receive(self, views: Sequence[memoryview]) -> int:
        if len(views) == 1:
            got = self._socket.recv_into(views[0], 0, socket.MSG_WAITALL)
        else:
            got = self._socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        if not got:
            raise ConnectionResetError("the peer closed the connection")
        return got

    def has_input(self) -> bool:
        """Return False: no received bytes are kept here."""
        return False


# Offsets in struct tcp_info of include/uapi/linux/tcp.h, stable since Linux 5.5. Only what is used is unpacked.
_TCP_INFO = 11
_READ_BYTES = 248
_NUMBER = struct.Struct("=I")
_MSS_AT, _SACKED_AT, _DATA_RECEIVED_AT, _RTT_AT = 16, 28, 52, 68
_MAX_PACING_RATE = struct.Struct("=Q")
_MAX_PACING_RATE_AT = 112
_HEARD_UNSENT_AND_MIN_RTT = struct.Struct("=III")
_HEARD_AT = 140
_PROGRESS = struct.Struct("=IIQQ")  # Segments delivered, those with ECN; bytes sent, bytes retransmitted.
_PROGRESS_AT = 192
_MICROSECOND, _MILLISECOND = 1e-6, 1e-3


class Growth(NamedTuple):
    """Progress of one or several connections over some time."""

    delivered_bytes: int = 0
    sent_bytes: int = 0
    retransmitted_bytes: int = 0


@dataclass(frozen=True)
class TcpInfo:
    """The kernel's figures of one connection. Byte counts and times are since its start; segments count modulo 2^32."""

    quiet_seconds: float  # Since data of the peer arrived.
    rtt_seconds: float
    min_rtt_seconds: float
    received_segments: int  # Received ones with acknowledgements, each of which may be a sample of the round trip.
    delivered_segments: int  # Also segments behind a lost one, which byte counts leave out for a round trip.
    segment_bytes: int
    out_of_order_bytes: int  # At the peer, behind a lost segment.
    bytes_sent: int
    bytes_retransmitted: int
    max_pacing_bytes_per_second: int
    unsent_bytes: int

    def received_since(self, before: TcpInfo | None) -> int:
        """Return the number of segments received since an earlier moment, or the start."""
        return (self.received_segments - (before or _START).received_segments) % (1 << 32)

    def grown_since(self, before: TcpInfo | None) -> Growth:
        """Return the growth since an earlier moment, or the start."""
        before = before or _START
        return Growth(
            (self.delivered_segments - before.delivered_segments) % (1 << 32) * self.segment_bytes,
            self.bytes_sent - before.bytes_sent,
            self.bytes_retransmitted - before.bytes_retransmitted,
        )


_START = TcpInfo(0.0, 0.0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0)


def read_tcp_info(connection: socket.socket) -> TcpInfo | None:
    """Return the kernel's figures, or None when the socket is closed or the kernel is too old."""
    try:
        raw = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _READ_BYTES)
    except OSError:
        return None
    if len(raw) < _PROGRESS_AT + _PROGRESS.size:
        return None
    heard, unsent, min_rtt = _HEARD_UNSENT_AND_MIN_RTT.unpack_from(raw, _HEARD_AT)
    delivered, _, sent, resent = _PROGRESS.unpack_from(raw, _PROGRESS_AT)
    segment_bytes = _NUMBER.unpack_from(raw, _MSS_AT)[0]
    return TcpInfo(
        quiet_seconds=_NUMBER.unpack_from(raw, _DATA_RECEIVED_AT)[0] * _MILLISECOND,
        rtt_seconds=_NUMBER.unpack_from(raw, _RTT_AT)[0] * _MICROSECOND,
        min_rtt_seconds=min_rtt * _MICROSECOND,
        received_segments=heard,
        delivered_segments=delivered,
        segment_bytes=segment_bytes,
        out_of_order_bytes=_NUMBER.unpack_from(raw, _SACKED_AT)[0] * segment_bytes,
        bytes_sent=sent,
        bytes_retransmitted=resent,
        max_pacing_bytes_per_second=_MAX_PACING_RATE.unpack_from(raw, _MAX_PACING_RATE_AT)[0],
        unsent_bytes=unsent,
    )
