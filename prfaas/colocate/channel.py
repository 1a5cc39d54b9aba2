"""Messages between two processes of one colocated instance, over a Unix socket in a private folder."""

from __future__ import annotations

import os
import pickle  # noqa: TID251 (both ends are this program, as one user, in a folder of that user alone)
import select
import socket
import struct
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

START_SECONDS = 600.0  # On busy cores the imports of the fork server alone took over two minutes.
SEND_SECONDS = 1  # A peer that reads nothing for this long is lost.
_PAUSE_SECONDS = 0.1
SOCKET_VARIABLE = "PRFAAS_COLOCATE_SOCKET"  # Tells vLLM's processes where the fork server listens.


class Channel:
    """One connection. A lost peer raises EOFError or OSError in every method."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    def connect(cls, *, wait_seconds: float = 0.0) -> Channel:
        """Connect to the fork server that the environment names. Wait for a server that still imports its libraries.

        A caller that does not wait is not kept waiting by `send` either.
        """
        deadline = time.monotonic() + wait_seconds
        while True:
            client = socket.socket(socket.AF_UNIX)
            if not wait_seconds:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
            try:
                client.setblocking(False)
                client.connect(os.environ[SOCKET_VARIABLE])
                client.setblocking(True)
                return cls(Connection(client.detach()))
            except OSError:
                client.close()
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_PAUSE_SECONDS)

    def send(self, message: Any) -> None:
        """Send any object. Plain pickle copies tensors; multiprocessing's own would pass their memory by descriptor."""
        self._connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def receive(self) -> Any:
        """Wait for the next message."""
        return pickle.loads(self._connection.recv_bytes())  # noqa: S301

    def has_message(self, timeout_seconds: float | None = 0.0) -> bool:
        """Return whether a message, or the loss of the peer, is waiting."""
        return self._connection.poll(timeout_seconds)

    def has_room(self) -> bool:
        """Return whether most of the socket's buffer is free. A message then waits only if it is larger than that."""
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._connection.close()


class ChannelServer:
    """Listener of a fork server."""

    def __init__(self, path: Path) -> None:
        self._listener = Listener(str(path), family="AF_UNIX", backlog=16)

    def accept(self) -> Channel:
        return Channel(self._listener.accept())

    def close(self) -> None:
        """Close this process's copy; the socket file stays for the fork server."""
        self._listener._listener._socket.close()  # type: ignore[attr-defined]  # close() would remove the file.
