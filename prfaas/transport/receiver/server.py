"""Server of a receiver: listens for links, authenticates peers, and bounds the connections of each.

A connection is a stranger until its handshake is done. Each connection has a thread, which runs its `Reader`.
"""

import contextlib
import ipaddress
import secrets
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from prfaas import logs, metrics
from prfaas.errors import RemoteProtocolError
from prfaas.transport.events import check_repeatedly
from prfaas.transport.net import handshake
from prfaas.transport.net.connection import Connection, WireConfig
from prfaas.transport.net.dialler import ReverseDialer, ReverseDialState
from prfaas.transport.net.handshake import HEARTBEAT, Identity
from prfaas.transport.net.sockets import listen, tune
from prfaas.transport.net.tls import refusal_reason
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import Hello
from prfaas.transport.protocol.wire import NO_TRANSFER, ConnectionState
from prfaas.transport.receiver.admission import FairQuota
from prfaas.transport.receiver.api import AcceptFunction, ReceiveEvent, ReceiveProgress
from prfaas.transport.receiver.dispatcher import InboundDispatcher
from prfaas.transport.receiver.reader import FrameQuota, Reader
from prfaas.types import FailureReason
from prfaas.units import is_public, join_address

MAX_CONNECTIONS = 1024  # Each costs a thread, a socket and up to one control frame in memory.
MAX_STRANGERS = 64  # Beyond it, the source with most strangers loses its oldest.
MAX_LOGGED_SOURCES = 64  # A port scan must not fill the log.
TICK_SECONDS = 0.1
CLOSE_SECONDS = 10.0
_log = logs.get("transport")


@dataclass(frozen=True)
class ReceiverConfig(WireConfig):
    """Settings of a receiver."""

    listen: str
    max_connections: int = MAX_CONNECTIONS
    fetch_from: Mapping[str, str] = field(default_factory=dict)  # Addresses of senders to dial, by name.


SendOver = Callable[[Connection, Hello], None]


class Receiver:
    """Listens for links. Its threads call `accept` and `on_event` without holding a lock."""

    def __init__(
        self,
        config: ReceiverConfig,
        *,
        local_name: str,
        key: bytes,
        accept: AcceptFunction,
        on_event: Callable[[ReceiveEvent], None],
        send_over: Mapping[str, SendOver] | None = None,
    ) -> None:
        """`accept` gets a function for its decision, which any thread may call once, at once or later.

        `send_over[peer](connection, hello)` sends over a connection that the peer has dialled to receive.
        """
        self._config = config
        self._identity = Identity(local_name, key, secrets.token_bytes(len(NO_TRANSFER)))
        self._dispatcher = InboundDispatcher(accept=accept, on_event=on_event, silence_seconds=config.silence_seconds)
        self._send_over = send_over or {}
        self._frame_quota, self._connection_quota = FrameQuota(), FairQuota(config.max_connections)
        self._lock = threading.Lock()
        self._connections: dict[Connection, threading.Thread] = {}
        self._strangers: dict[Connection, str] = {}  # Sources, the oldest connection first.
        self._refused: Counter[str] = Counter()
        self._logged_sources: set[str] = set()
        self._socket: socket.socket | None = None
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._reverse_dialers = [
            ReverseDialer(peer, address, config=config, identity=self._identity, serve=self._read, refuse=self._refuse)
            for peer, address in config.fetch_from.items()
        ]

    def start(self) -> str:
        """Listen, and return the bound "host:port".

        Raises:
            ConfigError: the address is taken, or public without certificates or `insecure_plaintext`.
        """
        self._socket = listen(self._config.listen, allow_public=self._config.allows_public)
        for target in (self._accept_forever, self._tick_forever):
            thread = threading.Thread(target=target, name=target.__name__, daemon=True)
            self._threads.append(thread)
            thread.start()
        return join_address(*self._socket.getsockname()[:2])

    @property
    def num_connections(self) -> int:
        """Number of connections over which peers send to this end, those in their handshake included."""
        with self._lock:
            num_accepted = sum(connection.state is not ConnectionState.SENDING for connection in self._connections)
        return num_accepted + sum(state.num_connections for state in self.reverse_dials())

    def reverse_dials(self) -> list[ReverseDialState]:
        """Return the state of the connections that this end dials, by peer."""
        return [dialer.snapshot() for dialer in self._reverse_dialers]

    @property
    def refused(self) -> dict[str, int]:
        """Number of connections that were refused or ended for what they sent, by reason."""
        with self._lock:
            return dict(self._refused)

    def cancel(self, transfer_id: bytes, reason: FailureReason, message: str) -> None:
        """End a transfer: ReceiveFailed does not follow, ReceiveMemoryFree does."""
        with self._dispatcher.exclusive() as transfers:
            transfers.cancel(transfer_id, reason, message, now=time.monotonic())

    def progress(self, transfer_id: bytes) -> ReceiveProgress | None:
        """Return what has arrived of a transfer; None unless it is being received."""
        with self._dispatcher.exclusive() as transfers:
            transfer = transfers.get(transfer_id)
            return None if transfer is None else transfer.progress()

    def close(self) -> None:
        """Close every connection and wait for the threads."""
        self._is_closed.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        for dialer in self._reverse_dialers:
            dialer.close()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            connection.abort()
        for thread in [*self._threads, *connections.values()]:
            thread.join(CLOSE_SECONDS)

    def _count_refusal(self, reason: str) -> None:
        """Count a refusal; the caller holds the lock."""
        self._refused[reason] += 1
        metrics.WIRE_REFUSALS.labels(reason=reason).inc()

    # Threads

    def _accept_forever(self) -> None:
        assert self._socket is not None
        while not self._is_closed.is_set():
            try:
                client, address = self._socket.accept()
                self._admit(client, str(address[0]))
            except (OSError, RuntimeError):
                # There may be descriptors or threads again in a moment.
                if self._is_closed.wait(TICK_SECONDS):
                    return

    def _admit(self, client: socket.socket, address: str) -> None:
        connection = Connection(client)
        thread = threading.Thread(target=self._serve, args=(connection, client), name="receive", daemon=True)
        with self._lock:
            if (reason := self._objection(address)) is not None:
                self._count_refusal(reason)
                if reason == "public":
                    self._log_public(address)
                connection.close()
                return
            if len(self._strangers) >= MAX_STRANGERS:
                self._count_refusal("strangers")
                self._abort_a_stranger()
            self._connections[connection] = thread
            self._strangers[connection] = source_of(address)
        try:
            thread.start()
        except RuntimeError:
            self._forget(connection)
            raise

    def _log_public(self, address: str) -> None:
        """Log once per source why it is refused; the caller holds the lock."""
        source = source_of(address)
        if source not in self._logged_sources and len(self._logged_sources) < MAX_LOGGED_SOURCES:
            self._logged_sources.add(source)
            reason = "the address is not private (nor is 100.64.0.0/10), and KV would cross it unencrypted"
            remedy = "set tls, or set insecure_plaintext: true"
            _log.warning("connection.refused", address=address, reason="public", message=f"{reason}: {remedy}")

    def _abort_a_stranger(self) -> None:
        """Abort the oldest stranger of the source that has most; the caller holds the lock."""
        [(largest, _)] = Counter(self._strangers.values()).most_common(1)
        oldest = next(connection for connection, source in self._strangers.items() if source == largest)
        del self._strangers[oldest]
        oldest.abort()

    def _objection(self, address: str) -> str | None:
        """Return the reason for refusing a connection from this address; the caller holds the lock."""
        if not self._config.allows_public and is_public(address):  # A public port may be forwarded to a private one.
            return "public"
        is_full = len(self._connections) >= self._config.max_connections
        return "connections" if is_full or self._is_closed.is_set() else None

    def _tick_forever(self) -> None:
        check_repeatedly(
            self._tick,
            is_closed=self._is_closed,
            pause_seconds=lambda: TICK_SECONDS,
            log_failure=lambda: _log.exception("receiver.tick_failed"),
        )

    def _tick(self, now: float) -> None:
        for dialer in self._reverse_dialers:
            dialer.dial_missing()
        self._dispatcher.tick(now)

    def _serve(self, connection: Connection, client: socket.socket) -> None:
        try:
            tune(client, congestion_control=self._config.congestion_control)
            connection.mark(self._config.marks.interactive)
            if self._config.certificates is not None:
                connection.secure(self._config.certificates, is_listener=True)
            hello = handshake.answer(connection, self._identity, sends_to=self._send_over)
            with self._authenticated(connection, hello.name):
                if connection.state is ConnectionState.SENDING:
                    self._send_over[hello.name](connection, hello)
                else:
                    self._read(connection, hello.name, hello.capabilities)
        except RemoteProtocolError as error:
            self._refuse(connection, error)
        except ssl.SSLError as error:
            with self._lock:
                self._count_refusal(refusal_reason(error))
        except OSError as error:
            # This side has ended the connection of a peer that was silent or too slow. Others are just lost.
            if isinstance(error, BlockingIOError) or (isinstance(error, TimeoutError) and error.errno is None):
                with self._lock:
                    self._count_refusal("slow")
        finally:
            self._forget(connection)

    @contextlib.contextmanager
    def _authenticated(self, connection: Connection, peer: str) -> Iterator[None]:
        """Count a stranger as a connection of this peer during the block.

        Raises:
            RemoteProtocolError: the peer has so many connections that others would find no room.
        """
        with self._lock:
            self._strangers.pop(connection, None)
            if not self._connection_quota.has_room(peer):
                raise RemoteProtocolError("connections", f"{peer} has too many connections")
            self._connection_quota.change(peer, 1)
        try:
            yield
        finally:
            with self._lock:
                self._connection_quota.change(peer, -1)

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
            self._connections.pop(connection, None)
        connection.close()

    def _read(self, connection: Connection, peer: str, capabilities: Collection[str]) -> None:
        """Read a connection whose peer has proven its name. Raises as `Reader.run`."""
        with self._dispatcher.exclusive() as transfers:
            transfers.connected(connection, peer, has_heartbeats=HEARTBEAT in capabilities)
        try:
            Reader(self._dispatcher, connection, peer=peer, quota=self._frame_quota).run()
        except RemoteProtocolError as error:
            _log.warning("connection.refused", peer=peer, reason=error.reason, message=str(error))
            raise
        finally:
            with self._dispatcher.exclusive() as transfers:
                transfers.disconnected(connection, peer, now=time.monotonic())

    def _refuse(self, connection: Connection, error: RemoteProtocolError) -> None:
        with self._lock:
            self._count_refusal(error.reason)
        if connection.try_write(messages.encode_refusal(error)):
            connection.leave()


def source_of(address: str) -> str:
    """Return the source behind an address: the /64 network of an IPv6 address, unless it is link-local."""
    parsed = ipaddress.ip_address(address)
    if parsed.version == 4 or parsed.is_link_local:
        return address
    return str(ipaddress.ip_network((int(parsed), 64), strict=False))
