"""Bytes over a blocking socket as they are: what `tls.TlsStream` is with encryption."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from prfaas.transport.views import bytes_after, first_bytes

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
