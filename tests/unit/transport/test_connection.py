"""Frames over one socket."""

from __future__ import annotations

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


class _Full(socket.socket):
    """Takes a few bytes, and then none for as long as a writer waits."""

    has_taken = False

    def sendmsg(self, buffers: Iterable[Any], *rest: Any) -> int:
        if self.has_taken:
            raise BlockingIOError
        self.has_taken = True
        return self.send(b"".join(buffers)[:TAKEN_BYTES])


@pytest.mark.parametrize("write", [Connection.write, Connection.write_at_once])
def test_after_a_part_of_a_frame_nothing_follows(write: Callable[[Connection, bytes], object]) -> None:
    ours, theirs = socket.socketpair()
    full = _Full(fileno=ours.detach())
    connection = Connection(full, state=ConnectionState.SENDING)
    with contextlib.closing(connection), theirs:
        with pytest.raises(BlockingIOError):
            write(connection, FRAME)
        full.has_taken = False
        with pytest.raises(BrokenPipeError):
            write(connection, FRAME)
        assert theirs.recv(2 * len(FRAME)) == FRAME[:TAKEN_BYTES]
        assert theirs.recv(1) == b""


@pytest.mark.parametrize(
    ("bytes_per_second", "kernels"), [(math.inf, (1 << 64) - 1), (2.0**64, (1 << 64) - 1), (2.5, 2), (0.25, 1)]
)
def test_the_slowest_pace_is_a_byte_a_second_and_not_none(bytes_per_second: float, kernels: int) -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours, state=ConnectionState.SENDING)
    with contextlib.closing(connection), theirs:
        connection.pace(bytes_per_second)
        assert struct.unpack("=Q", ours.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8)) == (kernels,)
