"""The receiving end of the wire: chunks go straight into the memory that `accept` gave, checked, acknowledged."""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import xxhash

from prfaas.errors import ConfigError, RemoteProtocolError
from prfaas.transport.connection import HANDSHAKE_SECONDS, SILENCE_SECONDS, Connection, tune
from prfaas.transport.ranges import Ranges
from prfaas.transport.wire import HEADER_BYTES, FrameType, Header, control

MAX_CONNECTIONS = 1024
MAX_ATTEMPTS_PER_CHUNK = 3
TICK_SECONDS = 0.1
MAX_ACKS_PER_FRAME = 64
ChunkOutcome = Literal["whole", "changed", "lost"]


@dataclass(frozen=True)
class ReceiverConfig:
    """How the receiving end listens."""

    listen: str
    insecure_plaintext: bool = False
    reconnect_seconds: float = 3.0
    congestion_control: str = "bbr"


@dataclass(frozen=True)
class TransferStats:
    """What a transfer cost on the wire."""

    wire_bytes: int
    checksum_failures: int


NOTHING_RECEIVED = TransferStats(0, 0)


@dataclass(frozen=True)
class OpenRequest:
    """A peer wants to send objects of these sizes."""

    transfer_id: bytes
    peer_name: str
    open_body: bytes
    object_bytes: Sequence[int]
    deadline_seconds: float


@dataclass(frozen=True)
class Accepted:
    """Send what is not `held`; `destination` gives the memory of an object."""

    held: Collection[int]
    destination: Callable[[int], memoryview]


@dataclass(frozen=True)
class Rejected:
    reason: Any
    message: str


@dataclass(frozen=True)
class ReceiveCompleted:
    transfer_id: bytes
    stats: TransferStats


@dataclass(frozen=True)
class ReceiveFailed:
    """A transfer ended without its data. Also said of a transfer that was cancelled before its OPEN came."""

    transfer_id: bytes
    peer_name: str
    reason: Any
    message: str
    stats: TransferStats = NOTHING_RECEIVED


@dataclass(frozen=True)
class ReceiveMemoryFree:
    transfer_id: bytes


ReceiveEvent = ReceiveCompleted | ReceiveFailed | ReceiveMemoryFree


@dataclass(eq=False)
class _Incoming:
    request: OpenRequest
    accepted: Accepted
    ranges: dict[int, Ranges] = field(default_factory=dict)  # of the objects that are not held
    missing_bytes: int = 0
    wire_bytes: int = 0
    checksum_failures: int = 0
    attempts: dict[tuple[int, int], int] = field(default_factory=dict)
    connections: set[Connection] = field(default_factory=set)
    alone_since: float | None = None  # when its last connection went
    deadline: float = 0.0
    num_writers: int = 0
    ended: bool = False

    @property
    def stats(self) -> TransferStats:
        return TransferStats(self.wire_bytes, self.checksum_failures)


class Receiver:
    """Listens for links. Events and `accept` are called from its threads; none of its locks are held then."""

    def __init__(
        self,
        config: ReceiverConfig,
        *,
        local_name: str,
        key: bytes,
        accept: Callable[[OpenRequest, Callable[[Accepted | Rejected], None]], None],
        on_event: Callable[[ReceiveEvent], None],
    ) -> None:
        self._config = config
        self._name = local_name
        self._key = key
        self._accept = accept
        self._on_event = on_event
        self._lock = threading.Lock()
        self._incoming: dict[bytes, _Incoming] = {}
        self._connections: dict[Connection, threading.Thread] = {}
        self._socket: socket.socket | None = None
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> str:
        """Listen; the bound address.

        Raises:
            ConfigError: the address is taken, or public without `insecure_plaintext`.
        """
        host, _, port = self._config.listen.rpartition(":")
        self._check_private(host.strip("[]"))
        try:
            self._socket = socket.create_server((host.strip("[]"), int(port)), backlog=128)
        except OSError as error:
            raise ConfigError(f"listen: {self._config.listen} cannot be bound ({error.strerror})") from error
        for target in (self._accept_forever, self._watch_forever):
            thread = threading.Thread(target=target, name=target.__name__, daemon=True)
            self._threads.append(thread)
            thread.start()
        bound = self._socket.getsockname()
        return f"{bound[0]}:{bound[1]}"

    def _check_private(self, host: str) -> None:
        if self._config.insecure_plaintext:
            return
        for *_, address in socket.getaddrinfo(host, None):
            ip = ipaddress.ip_address(address[0])
            if not ip.is_private or ip.is_unspecified:
                raise ConfigError(
                    f"listen: {host} is not a private address; KV would cross it unencrypted. "
                    "Listen on a private address, or set insecure_plaintext: true"
                )

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def cancel(self, transfer_id: bytes, reason: str, message: str) -> None:
        """End a transfer; ReceiveFailed does not follow, ReceiveMemoryFree does."""
        with self._lock:
            incoming = self._incoming.get(transfer_id)
            connections = list(incoming.connections) if incoming else []
        if incoming is None:
            return
        for connection in connections[:1]:
            self._say(connection, control(FrameType.CANCEL, [reason, message], transfer_id=transfer_id))
        self._end(incoming, None)

    def close(self) -> None:
        """Close every connection and wait for the threads."""
        self._closed.set()
        assert self._socket is not None
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            connection.close()
        for thread in [*self._threads, *connections.values()]:
            thread.join(HANDSHAKE_SECONDS)

    # Threads

    def _accept_forever(self) -> None:
        assert self._socket is not None
        while not self._closed.is_set():
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            if len(self._connections) >= MAX_CONNECTIONS:
                client.close()
                continue
            connection = Connection(client)
            thread = threading.Thread(target=self._serve, args=(connection, client), name="receive", daemon=True)
            with self._lock:
                self._connections[connection] = thread
            thread.start()

    def _watch_forever(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            now = time.monotonic()
            with self._lock:
                late = [(i, _lateness(i, now, self._config.reconnect_seconds)) for i in self._incoming.values()]
            for incoming, reason in late:
                if reason is not None:
                    message = f"{incoming.request.peer_name} did not finish: {reason}"
                    peer = incoming.request.peer_name
                    failed = ReceiveFailed(incoming.request.transfer_id, peer, reason, message, incoming.stats)
                    self._end(incoming, failed)

    def _serve(self, connection: Connection, client: socket.socket) -> None:
        try:
            connection.set_timeout(HANDSHAKE_SECONDS)
            tune(client, congestion_control=self._config.congestion_control)
            peer = connection.listen_handshake(self._key, local_name=self._name)
            connection.set_timeout(SILENCE_SECONDS)
            _Reader(self, connection, client, peer).run()
        except RemoteProtocolError as error:
            self._say(connection, control(FrameType.ERROR, [error.reason, str(error)]))
        except OSError:
            pass
        finally:
            connection.close()
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        now = time.monotonic()
        with self._lock:
            self._connections.pop(connection, None)
            for incoming in self._incoming.values():
                if connection in incoming.connections:
                    incoming.connections.discard(connection)
                    if not incoming.connections:
                        incoming.alone_since = now

    def _say(self, connection: Connection, frame: bytes) -> None:
        with contextlib.suppress(OSError):
            connection.write(frame)

    # Transfers

    def open(self, connection: Connection, request: OpenRequest) -> None:
        """A peer opens a transfer, or comes back to it on a new connection."""
        with self._lock:
            incoming = self._incoming.get(request.transfer_id)
        if incoming is not None and incoming.request.peer_name == request.peer_name:
            self._answer(connection, incoming)
        else:
            self._accept(request, lambda answer: self._decided(connection, request, answer))

    def _decided(self, connection: Connection, request: OpenRequest, answer: Accepted | Rejected) -> None:
        if isinstance(answer, Rejected):
            frame = control(FrameType.ERROR, [answer.reason, answer.message], transfer_id=request.transfer_id)
            self._say(connection, frame)
            return
        held = set(answer.held)
        sizes = {index: size for index, size in enumerate(request.object_bytes) if index not in held}
        incoming = _Incoming(request, answer, {index: Ranges() for index in sizes}, sum(sizes.values()))
        incoming.deadline = time.monotonic() + request.deadline_seconds
        with self._lock:
            self._incoming[request.transfer_id] = incoming
        self._answer(connection, incoming)

    def _answer(self, connection: Connection, incoming: _Incoming) -> None:
        with self._lock:
            incoming.connections.add(connection)
            incoming.alone_since = None
            partial = [(index, ranges.to_list()) for index, ranges in incoming.ranges.items() if ranges.total]
            complete = not incoming.missing_bytes
        held = [index for index in range(len(incoming.request.object_bytes)) if index not in incoming.ranges]
        transfer_id = incoming.request.transfer_id
        self._say(connection, control(FrameType.HAVE, [_runs(held), partial], transfer_id=transfer_id))
        if complete:
            self._complete(connection, incoming)

    def begin_write(self, connection: Connection, header: Header) -> memoryview | None:
        """Where a chunk goes, or None when nobody wants it. `end_write` must follow."""
        with self._lock:
            incoming = self._incoming.get(header.transfer_id)
            if incoming is None or incoming.ended or header.object not in incoming.ranges:
                return None
            if header.offset + header.length > incoming.request.object_bytes[header.object]:
                raise RemoteProtocolError(
                    "range", f"object {header.object} has no byte {header.offset + header.length}"
                )
            incoming.connections.add(connection)
            incoming.alone_since = None
            incoming.num_writers += 1
        return incoming.accepted.destination(header.object)[header.offset : header.offset + header.length]

    def end_write(self, connection: Connection, header: Header, outcome: ChunkOutcome) -> None:
        """A chunk was read from the wire whole, came changed, or its connection was lost within it."""
        event: ReceiveFailed | None = None
        with self._lock:
            incoming = self._incoming[header.transfer_id]
            incoming.num_writers -= 1
            incoming.wire_bytes += HEADER_BYTES + header.length
            if outcome == "whole" and not incoming.ended:
                incoming.missing_bytes -= incoming.ranges[header.object].add(
                    header.offset, header.offset + header.length
                )
            elif outcome == "changed":
                incoming.checksum_failures += 1
                key = (header.object, header.offset)
                incoming.attempts[key] = incoming.attempts.get(key, 0) + 1
                if incoming.attempts[key] >= MAX_ATTEMPTS_PER_CHUNK:
                    text = f"object {header.object} offset {header.offset} came changed {MAX_ATTEMPTS_PER_CHUNK} times"
                    event = ReceiveFailed(
                        header.transfer_id, incoming.request.peer_name, "checksum", text, incoming.stats
                    )
            complete = not incoming.missing_bytes and not incoming.ended
        if event is not None:
            self._say(
                connection, control(FrameType.CANCEL, ["checksum", event.message], transfer_id=header.transfer_id)
            )
            self._end(incoming, event)
        elif incoming.ended:
            self._end(incoming, None)
        elif outcome == "changed":
            body = [header.object, header.offset, header.length]
            self._say(connection, control(FrameType.AGAIN, body, transfer_id=header.transfer_id))
        elif complete:
            self._complete(connection, incoming)

    def _complete(self, connection: Connection, incoming: _Incoming) -> None:
        transfer_id = incoming.request.transfer_id
        self._end(incoming, ReceiveCompleted(transfer_id, incoming.stats))
        stats = [incoming.wire_bytes, incoming.checksum_failures]
        self._say(connection, control(FrameType.DONE, stats, transfer_id=transfer_id))

    def cancelled(self, transfer_id: bytes, peer: str, reason: str, message: str) -> None:
        """The sender gave up, perhaps before its OPEN came (they may cross on two connections)."""
        with self._lock:
            incoming = self._incoming.get(transfer_id)
        stats = incoming.stats if incoming else NOTHING_RECEIVED
        event = ReceiveFailed(transfer_id, peer, reason, message, stats)
        if incoming is None:
            self._on_event(event)
        elif incoming.request.peer_name == peer:
            self._end(incoming, event)

    def _end(self, incoming: _Incoming, event: ReceiveCompleted | ReceiveFailed | None) -> None:
        """End a transfer once; its memory is free when the last thread that writes to it is done."""
        transfer_id = incoming.request.transfer_id
        with self._lock:
            first = not incoming.ended
            incoming.ended = True
            free = incoming.num_writers == 0 and self._incoming.get(transfer_id) is incoming
            if free:
                del self._incoming[transfer_id]
        if first and event is not None:
            self._on_event(event)
        if free:
            self._on_event(ReceiveMemoryFree(transfer_id))


class _Reader:
    """Reads one connection's frames until it ends."""

    def __init__(self, receiver: Receiver, connection: Connection, client: socket.socket, peer: str) -> None:
        self._receiver = receiver
        self._connection = connection
        self._client = client
        self._peer = peer
        self._scratch = memoryview(bytearray(1 << 20))
        self._acks: list[tuple[bytes, list[int]]] = []

    def run(self) -> None:
        while True:
            if self._acks and (len(self._acks) >= MAX_ACKS_PER_FRAME or not self._more_to_read()):
                self._acknowledge()
            header = self._connection.read_header()
            if header.type is FrameType.CHUNK:
                self._chunk(header)
            elif header.type is FrameType.PING:
                self._connection.write(Header(FrameType.PONG, 0).encode())
            elif header.type is FrameType.OPEN:
                self._receiver.open(self._connection, self._open_request(header))
            elif header.type is FrameType.CANCEL:
                reason, message = self._connection.read_body(header)
                self._receiver.cancelled(header.transfer_id, self._peer, str(reason), str(message))
            else:
                raise RemoteProtocolError("order", f"{header.type.name} from a sender")

    def _more_to_read(self) -> bool:
        return bool(select.select([self._client], [], [], 0)[0])

    def _open_request(self, header: Header) -> OpenRequest:
        body = self._connection.read_body(header)
        try:
            open_body, sizes, deadline_seconds = body
            object_bytes = [size for size, count in sizes for _ in range(count)]
            if not (isinstance(open_body, bytes) and all(0 < size < 1 << 32 for size in object_bytes)):
                raise TypeError("sizes")
            return OpenRequest(header.transfer_id, self._peer, open_body, object_bytes, float(deadline_seconds))
        except (TypeError, ValueError) as error:
            raise RemoteProtocolError("body", f"OPEN: {error}") from error

    def _chunk(self, header: Header) -> None:
        target = self._receiver.begin_write(self._connection, header)
        if target is None:
            self._connection.read_into(self._scratch[: header.length])
            return
        outcome: ChunkOutcome = "lost"
        try:
            self._connection.read_into(target)
            outcome = "whole" if xxhash.xxh3_64_intdigest(target) == header.checksum else "changed"
        finally:
            target.release()
            self._receiver.end_write(self._connection, header, outcome)
        if outcome == "whole":
            self._acks.append((header.transfer_id, [header.object, header.offset, header.length]))

    def _acknowledge(self) -> None:
        by_transfer: dict[bytes, list[list[int]]] = {}
        for transfer_id, piece in self._acks:
            by_transfer.setdefault(transfer_id, []).append(piece)
        self._acks.clear()
        for transfer_id, pieces in by_transfer.items():
            self._connection.write(control(FrameType.ACK, pieces, transfer_id=transfer_id))


def _lateness(incoming: _Incoming, now: float, reconnect_seconds: float) -> str | None:
    if now >= incoming.deadline:
        return "deadline"
    if incoming.alone_since is not None and now - incoming.alone_since >= reconnect_seconds:
        return "unreachable"
    return None


def _runs(indices: Iterable[int]) -> list[list[int]]:
    """Ascending indices as [first, count] runs."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][0] + runs[-1][1] == index:
            runs[-1][1] += 1
        else:
            runs.append([index, 1])
    return runs
