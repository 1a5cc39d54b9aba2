"""What the kernel knows of a TCP connection: round trips, retransmissions, what it waits for (Linux, struct tcp_info)."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import NamedTuple

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
