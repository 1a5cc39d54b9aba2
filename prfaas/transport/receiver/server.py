"""The receiving end of the wire: listens for links, lets in who knows the secret, and bounds how many there are."""

from __future__ import annotations

import contextlib
import functools
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
from prfaas.transport.congestion.rate_budget import RateBudget
from prfaas.transport.events import watch
from prfaas.transport.net import handshake
from prfaas.transport.net.connection import Connection
from prfaas.transport.net.handshake import Identity, capabilities_of
from prfaas.transport.net.sockets import listen, tune
from prfaas.transport.net.tls import Certificates, refusal_reason
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import Hello
from prfaas.transport.protocol.wire import NO_TRANSFER
from prfaas.transport.receiver.admission import MAX_PIECES, FairQuota
from prfaas.transport.receiver.api import (
    Accepted,
    OpenRequest,
    ReceiveCompleted,
    ReceiveEvent,
    ReceiveFailed,
    ReceiveMemoryFree,
    Rejected,
    TransferStats,
)
from prfaas.transport.receiver.limits import ReceiveLimits
from prfaas.transport.receiver.reader import FrameQuota, Reader
from prfaas.transport.receiver.reverse_dial import InletConfig, ReverseDialer, ReverseDialState
from prfaas.transport.receiver.table import AcceptFunction, Arrivals
from prfaas.transport.receiver.transfer import say
from prfaas.types import FailureReason
from prfaas.units import is_public, join_address

__all__ = [
    "Accepted",
    "OpenRequest",
    "ReceiveCompleted",
    "ReceiveEvent",
    "ReceiveFailed",
    "ReceiveMemoryFree",
    "Receiver",
    "ReceiverConfig",
    "Rejected",
    "TransferStats",
]

MAX_CONNECTIONS = 1024  # each is a thread, a socket and up to one chunk's header in memory
MAX_STRANGERS = 64  # that have not proven who they are; of whoever has most of them the longest-waiting one goes first
MAX_PUBLIC = 64  # public sources that the log names; one that scans ports is not to fill it
TICK_SECONDS = 0.1
CLOSE_SECONDS = 10.0
_log = logs.get("transport")


@dataclass(frozen=True)
class ReceiverConfig:
    """How the receiving end listens."""

    listen: str
    certificates: Certificates | None = None  # None: unencrypted, which public addresses must allow
    insecure_plaintext: bool = False
    reconnect_seconds: float = 3.0
    congestion_control: str = "bbr"
    max_pieces: int = MAX_PIECES  # that all arriving transfers together may be kept as
    max_connections: int = MAX_CONNECTIONS
    num_connections: int = 0  # to each of `fetch_from`; 0: as many as the round trip asks for
    ingress_of: Callable[[str], tuple[RateBudget, ...]] = lambda peer: ()  # what a peer may send here, and with whom
    lossy_fp8: bool = False  # takes chunks whose values were cast to 8 bits, which loses some of each
    fetch_from: Mapping[str, str] = field(
        default_factory=dict
    )  # senders to dial, as they cannot dial us: address by name


SendOver = Callable[[Connection, Hello], None]


class Receiver:
    """Listens for links. Events and `accept` are called from its threads; none of its locks are held then."""

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
        """`accept` gets a reply function, which any thread may call, at once or later.

        `send_over[peer](connection, hello)` sends over a connection that this peer has dialled to receive, until it is lost.
        """
        self._config = config
        self._allows_public = config.insecure_plaintext or config.certificates is not None
        capabilities = capabilities_of(lossy_fp8=config.lossy_fp8)
        self._identity = Identity(local_name, key, secrets.token_bytes(len(NO_TRANSFER)), capabilities)
        self._arrivals = Arrivals(
            accept=accept, on_event=on_event, reconnect_seconds=config.reconnect_seconds, max_pieces=config.max_pieces
        )
        self._ingress = ReceiveLimits(config.ingress_of)
        self._send_over = send_over or {}
        self._bounds, self._admitted = FrameQuota(), FairQuota(config.max_connections)
        self._lock = threading.Lock()
        self._connections: dict[Connection, threading.Thread] = {}
        self._strangers: dict[Connection, str] = {}  # in order of arrival, and from where
        self._num_outgoing = 0  # connections, over which this side sends
        self._refused: Counter[str] = Counter()
        self._public: set[str] = set()  # sources that the log has named
        self._socket: socket.socket | None = None
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []
        inlet = InletConfig(
            config.num_connections, config.congestion_control, config.certificates, config.insecure_plaintext
        )
        self._inlets = [
            ReverseDialer(peer, address, config=inlet, identity=self._identity, serve=self._read, refuse=self._refuse)
            for peer, address in config.fetch_from.items()
        ]

    def start(self) -> str:
        """Listen; returns the bound "host:port".

        Raises:
            ConfigError: the address is taken, or public without certificates or `insecure_plaintext`.
        """
        self._socket = listen(self._config.listen, allow_public=self._allows_public)
        for target in (self._accept_forever, self._watch_forever):
            thread = threading.Thread(target=target, name=target.__name__, daemon=True)
            self._threads.append(thread)
            thread.start()
        return join_address(*self._socket.getsockname()[:2])

    @property
    def num_connections(self) -> int:
        """Over which others may send to this end, or are about to prove that they may."""
        with self._lock:
            accepted = len(self._connections) - self._num_outgoing
        return accepted + sum(inlet.num_connections for inlet in self.inlets())

    def inlets(self) -> list[ReverseDialState]:
        """How the connections stand that this end dials."""
        return [inlet.snapshot() for inlet in self._inlets]

    @property
    def refused(self) -> dict[str, int]:
        """How many connections were refused or ended for what they sent, by reason."""
        with self._lock:
            return dict(self._refused)

    def cancel(self, transfer_id: bytes, reason: FailureReason, message: str) -> None:
        """End a transfer; ReceiveFailed does not follow, ReceiveMemoryFree does."""
        self._arrivals.cancel(transfer_id, reason, message)

    def close(self) -> None:
        """Close every connection and wait for the threads; of a receiver that never started there are none."""
        self._is_closed.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        for inlet in self._inlets:
            inlet.close()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            connection.abort()
        for thread in [*self._threads, *connections.values()]:
            thread.join(CLOSE_SECONDS)

    def _count_refusal(self, reason: str) -> None:
        """With the lock held."""
        self._refused[reason] += 1
        metrics.WIRE_REFUSALS.labels(reason=reason).inc()

    # Threads

    def _accept_forever(self) -> None:
        assert self._socket is not None
        while not self._is_closed.is_set():
            try:
                client, address = self._socket.accept()
                self._let_in(client, str(address[0]))
            except (OSError, RuntimeError):
                if self._is_closed.wait(TICK_SECONDS):  # of descriptors and threads there may be more in a moment
                    return

    def _let_in(self, client: socket.socket, address: str) -> None:
        connection = Connection(client, state="hello")
        thread = threading.Thread(target=self._serve, args=(connection, client), name="receive", daemon=True)
        with self._lock:
            if (reason := self._objection(address)) is not None:
                self._count_refusal(reason)
                if reason == "public":
                    self._name_public(address)
                connection.close()
                return
            if len(self._strangers) >= MAX_STRANGERS:
                self._count_refusal("strangers")
                self._drop_a_stranger()
            self._connections[connection] = thread
            self._strangers[connection] = source_of(address)
        try:
            thread.start()
        except RuntimeError:
            self._forget(connection)
            raise

    def _name_public(self, address: str) -> None:
        """Log once of each source why it is not let in; with the lock held."""
        source = source_of(address)
        if source not in self._public and len(self._public) < MAX_PUBLIC:
            self._public.add(source)
            why = "it is not a private address (100.64.0.0/10 is none either), and KV would cross it unencrypted"
            remedy = "give the tls_ settings, or set insecure_plaintext: true"
            _log.warning("connection.refused", address=address, reason="public", message=f"{why}: {remedy}")

    def _drop_a_stranger(self) -> None:
        """The oldest of whoever has most of them here: one that floods makes room for itself. With the lock held."""
        [(most, _)] = Counter(self._strangers.values()).most_common(1)
        oldest = next(its for its, source in self._strangers.items() if source == most)
        del self._strangers[oldest]
        oldest.abort()

    def _objection(self, address: str) -> str | None:
        """Why a connection from this address is not let in; with the lock held."""
        if not self._allows_public and is_public(address):  # through a port that is forwarded to a private one
            return "public"
        is_full = len(self._connections) >= self._config.max_connections
        return "connections" if is_full or self._is_closed.is_set() else None

    def _watch_forever(self) -> None:
        watch(
            self._watch,
            is_closed=self._is_closed,
            pause_seconds=lambda: TICK_SECONDS,
            log_failure=lambda: _log.exception("receiver.watch_failed"),
        )

    def _watch(self, now: float) -> None:
        for inlet in self._inlets:
            inlet.start()
        self._arrivals.expire(now)
        self._ingress.tell(now)

    def _serve(self, connection: Connection, client: socket.socket) -> None:
        try:
            tune(client, congestion_control=self._config.congestion_control)
            if self._config.certificates is not None:
                connection.secure(self._config.certificates, is_listener=True)
            hello = handshake.answer(connection, self._identity, sends_to=self._send_over)
            with self._admitted_one(connection, hello.name):
                if connection.state == "sending":
                    self._send(connection, hello)
                else:
                    self._read(connection, hello.name, hello.capabilities)
        except RemoteProtocolError as error:
            self._refuse(connection, error)
        except ssl.SSLError as error:
            with self._lock:
                self._count_refusal(refusal_reason(error))
        except OSError as error:
            self._count_slowness(error)
        finally:
            self._forget(connection)

    @contextlib.contextmanager
    def _admitted_one(self, connection: Connection, peer: str) -> Iterator[None]:
        """A connection is no stranger's any more, but one of this peer's.

        Raises:
            RemoteProtocolError: it has so many that others would find no room.
        """
        with self._lock:
            self._strangers.pop(connection, None)
            if not self._admitted.has_room(peer):
                raise RemoteProtocolError("connections", f"{peer} has too many connections")
            self._admitted.change(peer, 1)
        try:
            yield
        finally:
            with self._lock:
                self._admitted.change(peer, -1)

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
            self._connections.pop(connection, None)
        connection.close()

    def _send(self, connection: Connection, hello: Hello) -> None:
        with self._lock:
            self._num_outgoing += 1
        try:
            self._send_over[hello.name](connection, hello)
        finally:
            with self._lock:
                self._num_outgoing -= 1

    def _read(self, connection: Connection, peer: str, capabilities: Collection[str]) -> None:
        """Read a connection whose peer has proven its name; raises what `Reader.run` does."""
        self._arrivals.joined(connection, peer)
        try:
            self._ingress.joined(connection, peer, capabilities, now=time.monotonic())
            Reader(
                self._arrivals,
                connection,
                peer=peer,
                bounds=self._bounds,
                came=functools.partial(self._ingress.came, peer),
                takes_lossy=self._config.lossy_fp8,
            ).run()
        except RemoteProtocolError as error:
            _log.warning("connection.refused", peer=peer, reason=error.reason, message=str(error))
            raise
        finally:
            self._ingress.left(connection, peer)
            self._arrivals.forget(connection, peer)

    def _count_slowness(self, error: OSError) -> None:
        """A peer that was silent, or dragged a frame out, is ended by this side; other connections are just lost."""
        if isinstance(error, BlockingIOError) or (isinstance(error, TimeoutError) and error.errno is None):
            with self._lock:
                self._count_refusal("slow")

    def _refuse(self, connection: Connection, error: RemoteProtocolError) -> None:
        with self._lock:
            self._count_refusal(error.reason)
        if say(connection, messages.encode_refusal(error)):
            connection.leave()


def source_of(address: str) -> str:
    """Who is behind an address, as far as that tells: of IPv6 whoever has one has its whole /64, but on the link itself."""
    found = ipaddress.ip_address(address)
    stands_for_itself = found.version == 4 or found.is_link_local
    return address if stands_for_itself else str(ipaddress.ip_network((int(found), 64), strict=False))
