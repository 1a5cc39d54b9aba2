"""Reverse connections, which a receiver dials to a sender that cannot reach it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from prfaas.errors import RemoteProtocolError
from prfaas.transport.net import handshake
from prfaas.transport.net.connection import Connection, DialConfig, open_connection
from prfaas.transport.net.dialler import Dialler
from prfaas.transport.net.handshake import Identity


@dataclass(frozen=True)
class ReverseDialState:
    """State of the reverse connections to one peer; `error` says why there are none."""

    peer: str
    address: str
    num_connections: int
    error: str


class ReverseDialer:
    """Keeps connections to one peer at all times, as only the peer knows when it will send."""

    def __init__(
        self,
        peer_name: str,
        address: str,
        *,
        config: DialConfig,
        num_connections: int,
        identity: Identity,
        serve: Callable[[Connection, str, Collection[str]], None],
        refuse: Callable[[Connection, RemoteProtocolError], None],
    ) -> None:
        """`serve(connection, peer, capabilities)` reads a connection until it is lost. `refuse` rejects a peer."""
        self._peer_name = peer_name
        self._address = address
        self._config = config
        self._identity = identity
        self._serve = serve
        self._refuse = refuse
        self._connections: set[Connection] = set()
        self._changed = threading.Condition(threading.Lock())
        self._dialler = Dialler(
            self._changed,
            connect=self._connect_once,
            is_busy=lambda: True,
            peer_name=peer_name,
            num_connections=num_connections,
        )

    def start(self) -> None:
        """Dial every missing connection. Call this repeatedly, as there may be no thread for one yet."""
        with self._changed:
            self._dialler.start()

    def close(self) -> None:
        """End every connection and every thread."""
        with self._changed:
            self._dialler.is_closed.set()
            for connection in self._connections:
                connection.abort()
            self._changed.notify_all()
        self._dialler.join()

    def snapshot(self) -> ReverseDialState:
        """Return the present state."""
        with self._changed:
            error = "" if self._connections else self._dialler.last_error.removeprefix("(").removesuffix(")")
            return ReverseDialState(self._peer_name, self._address, len(self._connections), error)

    def _connect_once(self, number: int) -> None:
        with open_connection(self._address, self._config) as connection:
            try:
                challenge = handshake.dial(connection, self._identity, peer_name=self._peer_name, receives=True)
                if self._add(connection, number):
                    self._serve(connection, self._peer_name, challenge.capabilities)
            except RemoteProtocolError as error:
                self._refuse(connection, error)
                raise
            finally:
                with self._changed:
                    self._connections.discard(connection)

    def _add(self, connection: Connection, number: int) -> bool:
        """Keep a new connection if it is wanted. The first one's round trip decides how many are."""
        with self._changed:
            if not self._connections:
                self._dialler.count_by(connection)
            if number >= self._dialler.num_wanted or self._dialler.is_closed.is_set():
                return False
            self._connections.add(connection)
            return True
