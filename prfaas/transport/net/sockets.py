"""The sockets of the wire: each is made and tuned here, and nowhere else."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prfaas.errors import ConfigError
from prfaas.transport.congestion.connection_policy import NOT_SENT_LOW_WATER_BYTES
from prfaas.transport.ranges import bytes_after, first_bytes
from prfaas.units import is_public, split_address

CONNECT_SECONDS = 5.0
SEND_SECONDS = 10.0  # a peer that takes nothing for this long is gone
SEND_BUFFER_BYTES = 4 << 20  # measured: 1.9 times the default's bytes in flight over 30 ms


def make_socket(address: str, *, congestion_control: str, allow_public: bool) -> socket.socket:
    """Connect to `address`; every socket of the wire is made here or in `listen`.

    Raises:
        ConfigError: it is no address, or public, and nobody has allowed that.
        OSError: nobody answers.
    """
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise ConfigError(f"{address!r} is {error}") from error
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if not allow_public and any(is_public(str(address[0])) for *_, address in found):
        raise ConfigError(
            f"{host} is public; give the tls_ settings, or set insecure_plaintext: true to send KV there unencrypted"
        )
    made = _connected(found)
    try:
        tune(made, congestion_control=congestion_control)
    except OSError:
        made.close()
        raise
    return made


def _connected(found: Iterable[tuple[int, int, int, str, Any]]) -> socket.socket:
    """A connection to the first of these addresses that answers, each as it was looked up: the next answer for a name may
    be an address that nobody has allowed, and a link-local one is nothing without its interface.

    Raises:
        OSError: none does.
    """
    failure = OSError("the name has no address")
    for family, kind, protocol, _, address in found:
        try:
            made = socket.socket(family, kind, protocol)
        except OSError as error:  # a family that this machine lacks
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
    """A listening socket.

    Raises:
        ConfigError: the address is taken, or public, and nobody has allowed that.
    """
    host, port = split_address(address)
    try:
        if not allow_public and (public := public_address(host)):
            raise ConfigError(
                f"listen: {public} is not a private address; KV would cross it unencrypted. "
                "Give the tls_ settings, listen on a private address, or set insecure_plaintext: true"
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"listen: {address} cannot be bound ({error.strerror})") from error


def public_address(host: str) -> str | None:
    """The first address of `host` that lies beyond private networks; binding to all of them counts."""
    found = socket.getaddrinfo(host, None)
    return host if any(is_public(str(address[0])) for *_, address in found) else None


def tune(connection: socket.socket, *, congestion_control: str) -> None:
    """Set what a long link needs; where the kernel refuses an optional setting its own default stays.

    SO_RCVBUF stays unset: setting it ends the kernel's own tuning, which reaches further.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_SECONDS * 1000))
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_LOW_WATER_BYTES)


RECEIVE_STEP_BYTES = 256 << 10  # a thread that reads a chunk is woken for so much, not for each packet


class PlainStream:
    """Bytes as they are. One call gives or takes a whole chunk: the socket blocks, with the kernel's own time-outs."""

    is_worn = is_worn_out = False

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, buffers: Sequence[bytes | memoryview], *, within_seconds: float) -> int:
        """Send all of it; returns its length."""
        left, deadline = sum(map(len, buffers)), time.monotonic() + within_seconds
        total = left
        while left:
            sent = self._socket.sendmsg(buffers)
            left -= sent
            if left:
                if time.monotonic() > deadline:
                    raise TimeoutError("the peer takes a frame too slowly")
                buffers = bytes_after(buffers, sent)
        return total

    def receive(self, views: Sequence[memoryview], *, within_seconds: float) -> int:
        """Fill `views`; returns their length."""
        total, deadline = sum(map(len, views)), time.monotonic() + within_seconds
        if total >= 2 * RECEIVE_STEP_BYTES:
            # Only while a whole step is still to come: the last bytes of a transfer are followed by nothing.
            steps = total - RECEIVE_STEP_BYTES
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, RECEIVE_STEP_BYTES)
            self._fill(first_bytes(views, steps), deadline)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            views = bytes_after(views, steps)
        self._fill(views, deadline)
        return total

    def _fill(self, views: Sequence[memoryview], deadline: float) -> None:
        left = sum(map(len, views))
        while left:
            got = self._receive(views)
            left -= got
            if left:
                if time.monotonic() > deadline:
                    raise TimeoutError("a frame comes too slowly")
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
        """Nothing is kept here."""
        return False


_TCP_INFO = 11
_READ_BYTES = 248
# Offsets of include/uapi/linux/tcp.h, stable since Linux 5.5; only what is used is unpacked, which takes about 2 µs.
_NUMBER = struct.Struct("=I")
_MSS_AT, _SACKED_AT, _RTT_AT = 16, 28, 68
_MAX_PACING_RATE = struct.Struct("=Q")
_MAX_PACING_RATE_AT = 112
_HEARD_UNSENT_AND_MIN_RTT = struct.Struct("=III")
_HEARD_AT = 140
# delivery rate, busy time, of that limited by the receive window, by the send buffer; delivered, of that with ECN; sent, resent
_PROGRESS = struct.Struct("=QQQQIIQQ")
_PROGRESS_AT = 160
_MICROSECOND = 1e-6


class Growth(NamedTuple):
    """What has come to a connection, or to several, over some time."""

    delivered_bytes: int = 0
    sent_bytes: int = 0
    retransmitted_bytes: int = 0
    busy_seconds: float = 0.0  # with something to send or to be acknowledged
    receiver_limited_seconds: float = 0.0  # of those, held up by the peer's receive window
    buffer_limited_seconds: float = 0.0  # of those, held up by our send buffer


@dataclass(frozen=True)
class TcpInfo:
    """One connection at one moment; byte counts and times are since it was made."""

    rtt_seconds: float
    min_rtt_seconds: float
    heard_segments: int  # modulo 2^32; acknowledgements too, each of which may be a sample of the round trip
    # modulo 2^32; also those behind a hole, which acknowledged bytes leave out for a round trip
    delivered_segments: int
    segment_bytes: int
    out_of_order_bytes: int  # at the peer, behind a lost segment: it reads none of them yet
    bytes_sent: int
    bytes_retransmitted: int
    max_pacing_bytes_per_second: int
    unsent_bytes: int
    delivery_bytes_per_second: int  # over about a round trip; swings by half
    busy_seconds: float
    receiver_limited_seconds: float
    buffer_limited_seconds: float

    def heard_since(self, before: TcpInfo | None) -> int:
        """Segments that have come from the peer since an earlier moment, or the start."""
        return (self.heard_segments - (before.heard_segments if before else 0)) % (1 << 32)

    def grown_since(self, before: TcpInfo | None) -> Growth:
        """What has come since an earlier moment, or the start."""
        if before is None:
            return Growth(
                self.delivered_segments * self.segment_bytes,
                self.bytes_sent,
                self.bytes_retransmitted,
                self.busy_seconds,
                self.receiver_limited_seconds,
                self.buffer_limited_seconds,
            )
        return Growth(
            (self.delivered_segments - before.delivered_segments) % (1 << 32) * self.segment_bytes,
            self.bytes_sent - before.bytes_sent,
            self.bytes_retransmitted - before.bytes_retransmitted,
            self.busy_seconds - before.busy_seconds,
            self.receiver_limited_seconds - before.receiver_limited_seconds,
            self.buffer_limited_seconds - before.buffer_limited_seconds,
        )


def read_tcp_info(connection: socket.socket) -> TcpInfo | None:
    """The kernel's figures, or None when the socket is closed or the kernel is older."""
    try:
        raw = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _READ_BYTES)
    except OSError:
        return None
    if len(raw) < _PROGRESS_AT + _PROGRESS.size:
        return None
    heard, unsent, min_rtt = _HEARD_UNSENT_AND_MIN_RTT.unpack_from(raw, _HEARD_AT)
    rate, busy, by_receiver, by_buffer, delivered, _, sent, resent = _PROGRESS.unpack_from(raw, _PROGRESS_AT)
    segment_bytes = _NUMBER.unpack_from(raw, _MSS_AT)[0]
    return TcpInfo(
        rtt_seconds=_NUMBER.unpack_from(raw, _RTT_AT)[0] * _MICROSECOND,
        min_rtt_seconds=min_rtt * _MICROSECOND,
        heard_segments=heard,
        delivered_segments=delivered,
        segment_bytes=segment_bytes,
        out_of_order_bytes=_NUMBER.unpack_from(raw, _SACKED_AT)[0] * segment_bytes,
        bytes_sent=sent,
        bytes_retransmitted=resent,
        max_pacing_bytes_per_second=_MAX_PACING_RATE.unpack_from(raw, _MAX_PACING_RATE_AT)[0],
        unsent_bytes=unsent,
        delivery_bytes_per_second=rate,
        busy_seconds=busy * _MICROSECOND,
        receiver_limited_seconds=by_receiver * _MICROSECOND,
        buffer_limited_seconds=by_buffer * _MICROSECOND,
    )
