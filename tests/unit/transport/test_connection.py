"""Frames over one socket, and the figures of a connection."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from prfaas.transport.congestion.stall_detector import ConnectionLiveness
from prfaas.transport.net.connection import RECENT_SECONDS, Connection, ConnectionStats, TcpHistory
from prfaas.transport.net.sockets import TcpInfo
from prfaas.transport.protocol.wire import ConnectionState, FrameType, Header

FRAME = Header(FrameType.PING, 0).encode()
TAKEN_BYTES = 10
SO_MAX_PACING_RATE = 47


class _FullSocket(socket.socket):
    """Socket that takes a few bytes, and then none."""

    has_taken = False

    def sendmsg(self, buffers: Iterable[Any], *rest: Any) -> int:
        if self.has_taken:
            raise BlockingIOError
        self.has_taken = True
        return self.send(b"".join(buffers)[:TAKEN_BYTES])


@pytest.mark.parametrize("write", [Connection.write, Connection.write_at_once])
def test_no_frame_follows_a_part_of_a_frame(write: Callable[[Connection, bytes], object]) -> None:
    near, far = socket.socketpair()
    full = _FullSocket(fileno=near.detach())
    connection = Connection(full, state=ConnectionState.SENDING)
    with contextlib.closing(connection), far:
        with pytest.raises(BlockingIOError):
            write(connection, FRAME)
        full.has_taken = False
        with pytest.raises(BrokenPipeError):
            write(connection, FRAME)
        assert far.recv(2 * len(FRAME)) == FRAME[:TAKEN_BYTES]
        assert far.recv(1) == b""


@pytest.mark.parametrize(
    ("bytes_per_second", "kernel_rate"), [(math.inf, (1 << 64) - 1), (2.0**64, (1 << 64) - 1), (2.5, 2), (0.25, 1)]
)
def test_the_slowest_pace_is_one_byte_per_second(bytes_per_second: float, kernel_rate: int) -> None:
    near, far = socket.socketpair()
    connection = Connection(near, state=ConnectionState.SENDING)
    with contextlib.closing(connection), far:
        connection.pace(bytes_per_second)
        assert struct.unpack("=Q", near.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8)) == (kernel_rate,)


NOTHING = TcpInfo(0.03, 0.03, 0, 0, 1448, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)


def _stats(
    info: TcpInfo, *, recent: TcpHistory, liveness: ConnectionLiveness | None = None, now: float
) -> ConnectionStats:
    liveness = liveness or ConnectionLiveness()
    return ConnectionStats.of(("a:1", "b:2"), info, recent=recent, liveness=liveness, unacknowledged_bytes=0, now=now)


def test_resent_ratio_and_limit_cover_only_the_last_seconds() -> None:
    recent = TcpHistory(0.0)
    early = replace(NOTHING, bytes_sent=1000, bytes_retransmitted=500, busy_seconds=60.0, buffer_limited_seconds=60.0)
    recent.add(early, 60.0)
    at_once = _stats(early, recent=recent, now=60.0)
    assert (at_once.resent_ratio, at_once.limit) == (0.5, "send_buffer"), "the whole life so far"
    later = replace(early, bytes_sent=3000, bytes_retransmitted=520, busy_seconds=69.0)
    recent.add(later, 60.0 + RECENT_SECONDS)
    shown = _stats(later, recent=recent, now=60.0 + RECENT_SECONDS)
    assert (shown.resent_ratio, shown.limit) == (20 / 2000, "network")
    assert (shown.sent_bytes, shown.retransmitted_bytes, shown.age_seconds) == (3000, 520, 70.0)


def test_a_history_keeps_samples_of_the_last_seconds() -> None:
    recent = TcpHistory(0.0)
    for tick in range(1000):
        at = tick / 20
        recent.add(replace(NOTHING, bytes_sent=int(at * 100), busy_seconds=at), at)
    last = replace(NOTHING, bytes_sent=5000, busy_seconds=50.0)
    seconds, grown = recent.until(last, 50.0)
    assert RECENT_SECONDS <= seconds < RECENT_SECONDS + 2
    assert grown.sent_bytes == round(seconds * 100)


def test_a_new_connection_has_no_limit() -> None:
    stats = _stats(NOTHING, recent=TcpHistory(7.0), now=7.0)
    assert (stats.limit, stats.resent_ratio) == (None, 0.0)


def test_a_connection_is_still_while_chunks_wait_and_nothing_moves() -> None:
    liveness, recent = ConnectionLiveness(began_at=0.0), TcpHistory(0.0)
    assert _stats(NOTHING, recent=recent, liveness=liveness, now=5.0).still_seconds == 0, "nothing waits"
    liveness.oldest_at = 5.0
    assert _stats(NOTHING, recent=recent, liveness=liveness, now=8.0).still_seconds == 3
    liveness.acknowledged(5.0, 5.0, oldest_at=6.0, now=8.0)
    assert _stats(NOTHING, recent=recent, liveness=liveness, now=9.0).still_seconds == 1
