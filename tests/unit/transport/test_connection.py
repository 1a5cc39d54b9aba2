"""Frames over one socket."""

import contextlib
import math
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from prfaas.transport.net.connection import Connection
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
