"""What the kernel knows of a TCP connection: round trips, retransmissions, unsent bytes (Linux, struct tcp_info)."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

_TCP_INFO = 11
_READ_BYTES = 248
# Offsets of include/uapi/linux/tcp.h, stable since Linux 5.5; only what is used is unpacked, which takes under 2 µs.
_NUMBER = struct.Struct("=I")
_MSS_AT, _RTT_AT, _MIN_RTT_AT, _DELIVERED_AT = 16, 68, 148, 192
_BYTES = struct.Struct("=Q")
_MAX_PACING_RATE_AT, _SENT_AT, _RETRANSMITTED_AT = 112, 200, 208
_MICROSECOND = 1e-6


@dataclass(frozen=True)
class TcpInfo:
    """One connection at one moment; byte counts are since it was made."""

    rtt_seconds: float
    min_rtt_seconds: float
    delivered_segments: (
        int  # modulo 2^32; also those behind a hole, which acknowledged bytes leave out for a round trip
    )
    segment_bytes: int
    bytes_sent: int
    bytes_retransmitted: int
    max_pacing_bytes_per_second: int

    def grown_since(self, before: TcpInfo | None) -> tuple[int, int, int]:
        """By how much bytes delivered, sent and retransmitted have grown since an earlier moment, or the start."""
        if before is None:
            return self.delivered_segments * self.segment_bytes, self.bytes_sent, self.bytes_retransmitted
        return (
            (self.delivered_segments - before.delivered_segments) % (1 << 32) * self.segment_bytes,
            self.bytes_sent - before.bytes_sent,
            self.bytes_retransmitted - before.bytes_retransmitted,
        )


def read(connection: socket.socket) -> TcpInfo | None:
    """The kernel's figures, or None when the socket is closed or the kernel is older."""
    try:
        raw = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _READ_BYTES)
    except OSError:
        return None
    if len(raw) < _RETRANSMITTED_AT + 8:
        return None
    return TcpInfo(
        rtt_seconds=_NUMBER.unpack_from(raw, _RTT_AT)[0] * _MICROSECOND,
        min_rtt_seconds=_NUMBER.unpack_from(raw, _MIN_RTT_AT)[0] * _MICROSECOND,
        delivered_segments=_NUMBER.unpack_from(raw, _DELIVERED_AT)[0],
        segment_bytes=_NUMBER.unpack_from(raw, _MSS_AT)[0],
        bytes_sent=_BYTES.unpack_from(raw, _SENT_AT)[0],
        bytes_retransmitted=_BYTES.unpack_from(raw, _RETRANSMITTED_AT)[0],
        max_pacing_bytes_per_second=_BYTES.unpack_from(raw, _MAX_PACING_RATE_AT)[0],
    )
