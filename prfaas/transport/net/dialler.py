"""Diallers, which keep as many connections as are wanted and replace lost ones: for a link, and in reverse for a receiver."""

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from prfaas import logs
from prfaas.errors import PrfaasError, RemoteProtocolError
from prfaas.transport.congestion.connection_policy import (
    FIRST_CONNECTIONS,
    ConnectionCount,
    LinkThroughput,
    connection_count,
)
from prfaas.transport.congestion.stall_detector import STEADY_SECONDS
from prfaas.transport.net import handshake
from prfaas.transport.net.connection import Connection, WireConfig, open_connection
from prfaas.transport.net.handshake import Identity
from prfaas.transport.net.tls import describe_error

_log = logs.get("transport")
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.05, 1.0
KEEP_WARM_SECONDS = 600.0  # After the last transfer, lost connections are still replaced for so long.
CLOSE_SECONDS = 15.0


class Dialler:
    """One thread per wanted connection. Callers hold the link's lock unless a method says otherwise."""

    def __init__(
        self,
        changed: threading.Condition,
        *,
        connect: Callable[[int], None],
        is_busy: Callable[[], bool],
        peer_name: str,
        num_connections: int = 0,
    ) -> None:
        """`connect(number)` makes one connection and serves it until it is lost; it is called without the lock.

        With `num_connections` 0, the round-trip time of the first connection decides the number.
        """
        self.num_wanted = num_connections or FIRST_CONNECTIONS
        self.keeps_warm = True
        self.last_error = ""
        self.is_closed = threading.Event()
        self._changed = changed
        self._connect = connect
        self._is_busy = is_busy
        self._peer_name = peer_name
        self._is_fixed = bool(num_connections)
        self._logged_count = 0
        self._congestion_control = ""
        self._last_used_at = time.monotonic()
        self._threads: dict[int, threading.Thread] = {}

    def start(self) -> None:
        """Start a thread for every wanted connection. Threads that cannot be started wait for the next call."""
        for number in range(0 if self.is_closed.is_set() else self.num_wanted):
            if number in self._threads:
                continue
            thread = threading.Thread(
                target=self._connect_forever, args=(number,), name=f"send-{self._peer_name}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                self.last_error = f"({error})"
                return
            self._threads[number] = thread

    def count_by(self, connection: Connection) -> None:
        """Decide the number of connections from the first one."""
        info = connection.tcp_info()
        self._congestion_control = connection.congestion_control()
        self._want(
            connection_count(
                rtt_seconds=info.min_rtt_seconds if info else 0.0, congestion_control=self._congestion_control
            )
        )

    def count_anew(self, throughput: LinkThroughput, *, rtt_seconds: float) -> None:
        """Decide the number of connections from their throughput, once all of them are connected."""
        if throughput.num_connections == self.num_wanted:
            control = self._congestion_control
            self._want(connection_count(rtt_seconds=rtt_seconds, congestion_control=control, throughput=throughput))

    def _want(self, wanted: ConnectionCount) -> None:
        if self._is_fixed:
            wanted = ConnectionCount(self.num_wanted, "set by num_connections")
        if wanted.count != self._logged_count:
            _log.info("link.connection_count_changed", peer=self._peer_name, count=wanted.count, reason=wanted.reason)
            self._logged_count = wanted.count
        self.num_wanted, self.keeps_warm = wanted.count, wanted.keeps_warm
        self.start()

    def used(self) -> None:
        """Note that a transfer has just ended."""
        self._last_used_at = time.monotonic()
        if not self.keeps_warm:
            self._changed.notify_all()

    def is_wanted(self) -> bool:
        """Return whether connections are kept: while transfers run, and for a while afterwards."""
        return self._is_busy() or (self.keeps_warm and time.monotonic() - self._last_used_at < KEEP_WARM_SECONDS)

    def is_idle(self, now: float) -> bool:
        """Return whether the link has been unused for long. `now` is monotonic seconds."""
        return not self._is_busy() and now - self._last_used_at >= KEEP_WARM_SECONDS

    def on_connection_lost(self, error: Exception) -> None:
        """Remember why a wanted connection was lost. Needs no lock."""
        if self.is_wanted():
            self.last_error = f"({describe_error(error)})"

    def join(self) -> None:
        """Wait for the threads after `is_closed` was set, without the lock."""
        for thread in list(self._threads.values()):
            thread.join(CLOSE_SECONDS)

    def _connect_forever(self, number: int) -> None:
        pause = FIRST_RETRY_SECONDS
        while self._wait_until_wanted(number):
            began_at = time.monotonic()
            try:
                self._connect(number)
            except (OSError, PrfaasError) as error:
                self.on_connection_lost(error)
            except Exception as error:  # The next connection may succeed; without a thread there is none.
                _log.exception("link.connection_failed", peer=self._peer_name)
                self.on_connection_lost(error)
            if time.monotonic() - began_at >= STEADY_SECONDS:
                pause = FIRST_RETRY_SECONDS
            self.is_closed.wait(pause)
            pause = min(2 * pause, MAX_RETRY_SECONDS)

    def _wait_until_wanted(self, number: int) -> bool:
        """Wait until the link is in use. Return False if this thread must end, as the connection is not wanted any more."""
        with self._changed:
            while not self.is_closed.is_set() and number < self.num_wanted:
                if self.is_wanted():
                    return True
                self._changed.wait(MAX_RETRY_SECONDS)
            if not self.is_closed.is_set():  # `join` needs the threads of a closed link.
                del self._threads[number]
        return False


@dataclass(frozen=True)
class ReverseDialState:
    """State of the reverse connections to one peer; `error` says why there are none."""

    peer: str
    address: str
    num_connections: int
    error: str


class ReverseDialer(Dialler):
    """Keeps connections that a receiver dials to a sender that cannot reach it, at all times.

    Only the sender knows when it will send.
    """

    def __init__(
        self,
        peer_name: str,
        address: str,
        *,
        config: WireConfig,
        identity: Identity,
        serve: Callable[[Connection, str, Collection[str]], None],
        refuse: Callable[[Connection, RemoteProtocolError], None],
    ) -> None:
        """`serve(connection, peer, capabilities)` reads a connection until it is lost. `refuse` rejects a peer."""
        changed = threading.Condition(threading.Lock())
        super().__init__(changed, connect=self._connect_once, is_busy=lambda: True, peer_name=peer_name)
        self._address = address
        self._config = config
        self._identity = identity
        self._serve = serve
        self._refuse = refuse
        self._connections: set[Connection] = set()

    def dial_missing(self) -> None:
        """Dial every missing connection. Call this repeatedly, as there may be no thread for one yet."""
        with self._changed:
            self.start()

    def close(self) -> None:
        """End every connection and every thread."""
        with self._changed:
            self.is_closed.set()
            for connection in self._connections:
                connection.abort()
            self._changed.notify_all()
        self.join()

    def snapshot(self) -> ReverseDialState:
        """Return the present state."""
        with self._changed:
            error = "" if self._connections else self.last_error.removeprefix("(").removesuffix(")")
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
                self.count_by(connection)
            if number >= self.num_wanted or self.is_closed.is_set():
                return False
            self._connections.add(connection)
            return True
