"""Keeps the connections of a link: dials as many as are wanted, and dials again whatever is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from prfaas import logs
from prfaas.errors import PrfaasError
from prfaas.transport.congestion.connection_policy import (
    FIRST_CONNECTIONS,
    ConnectionCount,
    LinkThroughput,
    connection_count,
)
from prfaas.transport.congestion.stall_detector import STEADY_SECONDS
from prfaas.transport.net.connection import Connection
from prfaas.transport.net.tls import describe_error

_log = logs.get("transport")
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.05, 1.0
KEEP_WARM_SECONDS = 600.0  # lost connections of a link are made again so long after its last transfer
CLOSE_SECONDS = 15.0


class Dialler:
    """A thread for each connection that is wanted. What is not said to lock is called with the link's lock held."""

    def __init__(
        self,
        changed: threading.Condition,
        *,
        connect: Callable[[int], None],
        is_busy: Callable[[], bool],
        peer_name: str,
        num_connections: int,
    ) -> None:
        """`connect(number)`, called without the lock, makes one connection and serves it until it is lost.

        `num_connections` 0: as many as the first one's round trip asks for.
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
        self._logged = 0  # the number that the log has last
        self._congestion_control = ""
        self._last_used_at = time.monotonic()
        self._threads: dict[int, threading.Thread] = {}  # by the number of the connection

    def start(self) -> None:
        """Have a thread for every connection that is wanted; what cannot be started now waits for the next call."""
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
        """Decide from the link's first connection how many there should be."""
        info = connection.tcp_info()
        self._congestion_control = connection.congestion_control()
        self._want(
            connection_count(
                rtt_seconds=info.min_rtt_seconds if info else 0.0, congestion_control=self._congestion_control
            )
        )

    def count_anew(self, carried: LinkThroughput, *, rtt_seconds: float) -> None:
        """Decide from what all that are wanted have carried; while one is missing nothing changes."""
        if carried.num_connections == self.num_wanted:
            control = self._congestion_control
            self._want(connection_count(rtt_seconds=rtt_seconds, congestion_control=control, carried=carried))

    def _want(self, wanted: ConnectionCount) -> None:
        if self._is_fixed:
            wanted = ConnectionCount(self.num_wanted, "num_connections says so")
        if wanted.count != self._logged:
            _log.info("link.connections", peer=self._peer_name, count=wanted.count, reason=wanted.reason)
            self._logged = wanted.count
        self.num_wanted, self.keeps_warm = wanted.count, wanted.keeps_warm
        self.start()

    def used(self) -> None:
        """A transfer has just ended."""
        self._last_used_at = time.monotonic()
        if not self.keeps_warm:
            self._changed.notify_all()

    def is_wanted(self) -> bool:
        """Whether somebody sends, or has sent not long ago: then connections are kept, and made again."""
        return self._is_busy() or (self.keeps_warm and time.monotonic() - self._last_used_at < KEEP_WARM_SECONDS)

    def is_idle(self, now: float) -> bool:
        """Whether nobody has sent for so long that no connection is kept; `now` is monotonic seconds."""
        return not self._is_busy() and now - self._last_used_at >= KEEP_WARM_SECONDS

    def lost_by(self, error: Exception) -> None:
        """Remember why there is no connection; one that nobody wants any more says nothing. Takes no lock."""
        if self.is_wanted():
            self.last_error = f"({describe_error(error)})"

    def join(self) -> None:
        """Wait for the threads, after `is_closed` was set; takes no lock."""
        for thread in list(self._threads.values()):
            thread.join(CLOSE_SECONDS)

    def _connect_forever(self, number: int) -> None:
        pause = FIRST_RETRY_SECONDS
        while self._wait_until_wanted(number):
            began_at = time.monotonic()
            try:
                self._connect(number)
            except (OSError, PrfaasError) as error:
                self.lost_by(error)
            except Exception as error:  # the next connection may do better than no thread at all
                _log.exception("link.failed", peer=self._peer_name)
                self.lost_by(error)
            if time.monotonic() - began_at >= STEADY_SECONDS:
                pause = FIRST_RETRY_SECONDS
            self.is_closed.wait(pause)
            pause = min(2 * pause, MAX_RETRY_SECONDS)

    def _wait_until_wanted(self, number: int) -> bool:
        """Wait until the link is in use; False: it is closed, or should have fewer connections, and this thread ends."""
        with self._changed:
            while not self.is_closed.is_set() and number < self.num_wanted:
                if self.is_wanted():
                    return True
                self._changed.wait(MAX_RETRY_SECONDS)
            if not self.is_closed.is_set():  # else who joins wants to know it
                del self._threads[number]
        return False
