"""Messages between two processes of one colocated instance, over a Unix socket in a private folder."""

from __future__ import annotations

import os
import pickle  # noqa: TID251 (both ends are this program, as one user, in a folder of that user alone)
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

CONNECT_SECONDS, CONNECT_PAUSE_SECONDS = 600.0, 0.1  # On busy cores the imports alone took over two minutes.
SOCKET_VARIABLE = "PRFAAS_COLOCATE_SOCKET"  # Tells vLLM's processes where the fork server listens.


class Channel:
    """One connection. A lost peer raises EOFError or OSError in every method."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    def connect(cls, path: Path | None = None) -> Channel:
        """Connect to a fork server: the one that the environment names, or the one at `path`."""
        address = str(path or os.environ[SOCKET_VARIABLE])
        deadline = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                return cls(Client(address, family="AF_UNIX"))
            except (FileNotFoundError, ConnectionRefusedError):  # The fork server still imports its libraries.
                if time.monotonic() > deadline:
                    raise
                time.sleep(CONNECT_PAUSE_SECONDS)

    def send(self, message: Any) -> None:
        """Send any object. Plain pickle copies tensors; multiprocessing's own would pass their memory by descriptor."""
        self._connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def receive(self) -> Any:
        """Wait for the next message."""
        return pickle.loads(self._connection.recv_bytes())  # noqa: S301

    def has_message(self, timeout_seconds: float = 0.0) -> bool:
        """Return whether a message, or the loss of the peer, is waiting."""
        return self._connection.poll(timeout_seconds)

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
