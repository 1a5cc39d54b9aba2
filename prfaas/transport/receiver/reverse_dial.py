"""Connections that a receiving end dials, to a sending peer that cannot reach it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from prfaas.errors import RemoteProtocolError
from prfaas.transport.net import handshake
from prfaas.transport.net.connection import Connection, open_connection
from prfaas.transport.net.dialler import Dialler
from prfaas.transport.net.handshake import Identity
from prfaas.transport.net.tls import Certificates


@dataclass(frozen=True)
class InletConfig:
    """How the connections are made."""

    num_connections: int = 0  # 0: as many as the round trip asks for
    congestion_control: str = "bbr"
    certificates: Certificates | None = None  # None: unencrypted, which public addresses must allow
    insecure_plaintext: bool = False


@dataclass(frozen=True)
class ReverseDialState:
    """How an inlet stands; `error`: why it has no connection."""

    peer: str
    address: str
    num_connections: int
    error: str


class ReverseDialer:
    """Keeps connections to one peer for as long as it is open: only the peer knows when it will send."""

    def __init__(
        self,
        peer_name: str,
        address: str,
        *,
        config: InletConfig,
        identity: Identity,
        serve: Callable[[Connection, str, Collection[str]], None],
        refuse: Callable[[Connection, RemoteProtocolError], None],
    ) -> None:
        """`serve(connection, peer, capabilities)` reads one until it is lost; `refuse` counts and tells a peer that breaks
        the protocol."""
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
            num_connections=config.num_connections,
        )

    def start(self) -> None:
        """Dial, and dial again whatever is lost; to be called now and then, as there may be no thread for it yet."""
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
        """How it stands now."""
        with self._changed:
            error = "" if self._connections else self._dialler.last_error.removeprefix("(").removesuffix(")")
            return ReverseDialState(self._peer_name, self._address, len(self._connections), error)

    def _connect_once(self, number: int) -> None:
        config = self._config
        with open_connection(
            self._address,
            congestion_control=config.congestion_control,
            certificates=config.certificates,
            allow_public=config.insecure_plaintext,
        ) as connection:
            try:
                challenge = handshake.dial(connection, self._identity, peer_name=self._peer_name, receives=True)
                if self._is_one_more(connection, number):
                    self._serve(connection, self._peer_name, challenge.capabilities)
            except RemoteProtocolError as error:
                self._refuse(connection, error)
                raise
            finally:
                with self._changed:
                    self._connections.discard(connection)

    def _is_one_more(self, connection: Connection, number: int) -> bool:
        """Whether a new connection is wanted; the first one's round trip decides how many are."""
        with self._changed:
            if not self._connections:
                self._dialler.count_by(connection)
            if number >= self._dialler.num_wanted or self._dialler.is_closed.is_set():
                return False
            self._connections.add(connection)
            return True
