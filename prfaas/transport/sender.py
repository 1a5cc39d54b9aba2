"""The sending end of the wire: one queue of ready bytes towards a peer, several connections that take from it."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from prfaas.errors import RemoteProtocolError
from prfaas.transport.connection import SILENCE_SECONDS, Connection, make_socket
from prfaas.transport.link_state import LinkState, retransmit_ratio
from prfaas.transport.ranges import Ranges
from prfaas.transport.receiver import TransferStats
from prfaas.transport.tcp_info import TcpInfo
from prfaas.transport.wire import FrameType, Header, control

CHUNK_BYTES = 256 << 10
TICK_SECONDS = 0.05
KEEP_WARM_SECONDS = 600.0  # lost connections of a link are made again so long after its last transfer
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.05, 1.0


@dataclass(frozen=True)
class LinkConfig:
    """How a link is made."""

    num_connections: int = 8
    congestion_control: str = "bbr"
    reconnect_seconds: float = 3.0


@dataclass(frozen=True)
class Outgoing:
    """Objects to send; `source` gives an object's memory, which must stay unchanged until SendMemoryFree."""

    transfer_id: bytes
    open_body: bytes
    object_bytes: Sequence[int]
    source: Callable[[int], memoryview]
    priority: int
    deadline_seconds: float


@dataclass(frozen=True)
class SendAccepted:
    transfer_id: bytes
    missing_bytes: int


@dataclass(frozen=True)
class SendProgress:
    transfer_id: bytes
    acked_bytes: int
    time_ns: int


@dataclass(frozen=True)
class SendCompleted:
    transfer_id: bytes
    stats: TransferStats


@dataclass(frozen=True)
class SendFailed:
    transfer_id: bytes
    reason: Any
    message: str


@dataclass(frozen=True)
class SendMemoryFree:
    transfer_id: bytes


SendEvent = SendAccepted | SendProgress | SendCompleted | SendFailed | SendMemoryFree


@dataclass(eq=False)
class _Sending:
    transfer: Outgoing
    deadline: float
    accepted: bool = False
    early: list[tuple[int, int, int]] = field(default_factory=list)  # ready before HAVE
    held: set[int] = field(default_factory=set)
    acked: dict[int, Ranges] = field(default_factory=dict)
    missing_bytes: int = 0
    acked_bytes: int = 0
    num_users: int = 0  # threads that read its memory
    ended: bool = False


@dataclass(order=True)
class _Work:
    """A range of one object that may leave."""

    priority: int
    order: int
    sending: _Sending = field(compare=False)
    object: int = field(compare=False)
    start: int = field(compare=False)
    end: int = field(compare=False)


class Link:
    """The sending end towards one peer. Connects at the first transfer and stays connected."""

    def __init__(
        self,
        address: str,
        *,
        config: LinkConfig,
        local_name: str,
        peer_name: str,
        key: bytes,
        on_event: Callable[[SendEvent], None],
    ) -> None:
        self.address = address
        self._config = config
        self._local_name = local_name
        self._peer_name = peer_name
        self._key = key
        self._on_event = on_event
        self._changed = threading.Condition()
        self._sendings: dict[bytes, _Sending] = {}
        self._work: list[_Work] = []
        self._to_open: deque[_Sending] = deque()
        self._cancels: deque[bytes] = deque()
        self._order = itertools.count()
        self._num_connected = 0
        self._last_transfer_at = time.monotonic()
        self._disconnected_since: float | None = None
        self._in_flight_bytes = 0
        self._acknowledged_bytes = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._lines: set[_Line] = set()

    # What the agent says

    def open(self, transfer: Outgoing) -> None:
        sending = _Sending(transfer, time.monotonic() + transfer.deadline_seconds)
        with self._changed:
            self._sendings[transfer.transfer_id] = sending
            self._last_transfer_at = time.monotonic()
            self._to_open.append(sending)
            if self._num_connected == 0 and self._disconnected_since is None:
                self._disconnected_since = time.monotonic()
            self._changed.notify_all()
            if not self._threads:
                self._start()

    def _start(self) -> None:
        targets = [self._watch_forever, *[self._connect_forever] * self._config.num_connections]
        for target in targets:
            thread = threading.Thread(target=target, name=f"send-{self._peer_name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def ready(
        self, transfer_id: bytes, *, first_object: int, num_objects: int, offset_bytes: int, length_bytes: int
    ) -> None:
        """This range of each of these objects may leave."""
        with self._changed:
            sending = self._sendings.get(transfer_id)
            if sending is None or sending.ended:
                return
            for index in range(first_object, first_object + num_objects):
                piece = (index, offset_bytes, offset_bytes + length_bytes)
                if sending.accepted:
                    self._enqueue(sending, *piece)
                else:
                    sending.early.append(piece)
            self._changed.notify(num_objects)

    def _enqueue(self, sending: _Sending, index: int, start: int, end: int) -> None:
        if index not in sending.held:
            heapq.heappush(self._work, _Work(sending.transfer.priority, next(self._order), sending, index, start, end))

    def cancel(self, transfer_id: bytes, reason: str, message: str) -> None:
        """End a transfer; SendFailed and SendMemoryFree follow, the peer hears of it."""
        with self._changed:
            sending = self._sendings.get(transfer_id)
            if sending is None:
                return
            self._cancels.append(control(FrameType.CANCEL, [reason, message], transfer_id=transfer_id))
            self._changed.notify()
        self._end(sending, SendFailed(transfer_id, reason, message))

    def close(self) -> None:
        """End every transfer and every thread."""
        with self._changed:
            self._closed = True
            sendings, lines = list(self._sendings.values()), list(self._lines)
            self._changed.notify_all()
        for sending in sendings:
            self._end(sending, SendFailed(sending.transfer.transfer_id, "shutdown", "this agent stops"))
        for line in lines:
            line.close()
        for thread in self._threads:
            thread.join(15)

    def snapshot(self) -> LinkState:
        """The link's figures; costs a few microseconds a connection."""
        with self._changed:
            infos = [info for line in self._lines if (info := line.tcp_info()) is not None]
            return LinkState(
                peer=self._peer_name,
                address=self.address,
                num_connections=self._num_connected,
                num_transfers=len(self._sendings),
                queued_bytes=sum(work.end - work.start for work in self._work if not work.sending.ended),
                unacknowledged_bytes=self._in_flight_bytes,
                acknowledged_bytes=self._acknowledged_bytes,
                rtt_seconds=max((info.rtt_seconds for info in infos), default=0.0),
                min_rtt_seconds=min((info.min_rtt_seconds for info in infos), default=0.0),
                delivery_bytes_per_second=sum(info.delivery_bytes_per_second for info in infos),
                retransmit_ratio=retransmit_ratio(infos),
            )

    # Threads

    def _watch_forever(self) -> None:
        while not self._closed:
            time.sleep(TICK_SECONDS)
            now = time.monotonic()
            with self._changed:
                since = self._disconnected_since
                gone = since is not None and now - since >= self._config.reconnect_seconds
                late = [
                    (s, "unreachable" if gone else "deadline")
                    for s in self._sendings.values()
                    if gone or now >= s.deadline
                ]
            for sending, reason in late:
                message = f"{self._peer_name} at {self.address} was not reached in time"
                self.cancel(sending.transfer.transfer_id, reason, message)

    def _connect_forever(self) -> None:
        pause = FIRST_RETRY_SECONDS
        while not self._closed:
            if self._is_forgotten():
                self._wait_for_work()
                continue
            try:
                sock = make_socket(self.address, congestion_control=self._config.congestion_control)
                line = Connection(sock)
            except OSError:
                time.sleep(pause)
                pause = min(2 * pause, MAX_RETRY_SECONDS)
                continue
            try:
                line.dial_handshake(self._key, local_name=self._local_name, peer_name=self._peer_name)
                pause = FIRST_RETRY_SECONDS
                line.set_timeout(SILENCE_SECONDS)
                _Line(self, line).run()
            except (OSError, RemoteProtocolError):
                time.sleep(pause)
            finally:
                line.close()

    def _is_forgotten(self) -> bool:
        """Whether nobody has sent anything for so long that lost connections are not made again before somebody does."""
        with self._changed:
            return not self._sendings and time.monotonic() - self._last_transfer_at > KEEP_WARM_SECONDS

    def _wait_for_work(self) -> None:
        with self._changed:
            if not self._sendings and not self._closed:
                self._changed.wait(MAX_RETRY_SECONDS)

    # What the connections do, under the lock where they touch the link

    def connected(self, line: _Line) -> None:
        with self._changed:
            self._lines.add(line)
            self._num_connected += 1
            self._disconnected_since = None
            if self._closed:
                raise ConnectionAbortedError("the link is closed")

    def lost(self, line: _Line, unacknowledged: Sequence[_Work]) -> None:
        """A connection went: what it carried goes to the others; when it was the last, every transfer is opened again."""
        with self._changed:
            self._lines.discard(line)
            self._num_connected -= 1
            for work in unacknowledged:
                self._in_flight_bytes -= work.end - work.start
                if not work.sending.ended:
                    heapq.heappush(self._work, work)
            if self._num_connected == 0:
                self._disconnected_since = time.monotonic()
                self._to_open.extend(s for s in self._sendings.values() if s not in self._to_open)
            self._changed.notify_all()

    def next_frame(self, alive: threading.Event, timeout_seconds: float) -> bytes | _Sending | _Work | None:
        """What to send next: a cancel, an open, a chunk; None when nothing came up in time.

        Raises:
            OSError: the connection is not `alive` any more, or the link is closed.
        """
        with self._changed:
            end = time.monotonic() + timeout_seconds
            while alive.is_set() and not self._closed:
                if self._cancels:
                    return self._cancels.popleft()
                if self._to_open:
                    return self._to_open.popleft()
                work = self._take_chunk()
                if work is not None:
                    return work
                left = end - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
        raise ConnectionAbortedError("the connection or the link is closed")

    def wake(self) -> None:
        """Have every connection look at what there is to do."""
        with self._changed:
            self._changed.notify_all()

    def _take_chunk(self) -> _Work | None:
        """The next bytes to send; the transfer's memory is in use until `sent`."""
        while self._work:
            work = heapq.heappop(self._work)
            if work.sending.ended:
                continue
            if work.end - work.start > CHUNK_BYTES:
                rest = _Work(work.priority, work.order, work.sending, work.object, work.start + CHUNK_BYTES, work.end)
                heapq.heappush(self._work, rest)
                work = _Work(work.priority, work.order, work.sending, work.object, work.start, work.start + CHUNK_BYTES)
            work.sending.num_users += 1
            return work
        return None

    def sent(self, work: _Work) -> None:
        with self._changed:
            work.sending.num_users -= 1
            self._in_flight_bytes += work.end - work.start
            ended = work.sending.ended
        if ended:
            self._end(work.sending, None)

    def have(self, transfer_id: bytes, held_runs: list[list[int]], partial: list[tuple[int, list[list[int]]]]) -> None:
        """The peer has accepted a transfer and says what it holds."""
        with self._changed:
            sending = self._sendings.get(transfer_id)
            if sending is None or sending.ended:
                return
            first = not sending.accepted
            if first:
                self._accept(sending, held_runs)
            for index, ranges in partial:
                for start, end in ranges:
                    sending.acked_bytes += sending.acked[index].add(start, end)
            missing = sending.missing_bytes
            self._changed.notify_all()
        if first:
            self._on_event(SendAccepted(transfer_id, missing))

    def _accept(self, sending: _Sending, held_runs: list[list[int]]) -> None:
        sending.held = {index for start, count in held_runs for index in range(start, start + count)}
        sizes = sending.transfer.object_bytes
        sending.acked = {index: Ranges() for index in range(len(sizes)) if index not in sending.held}
        sending.missing_bytes = sum(sizes[index] for index in sending.acked)
        sending.accepted = True
        for piece in sending.early:
            self._enqueue(sending, *piece)
        sending.early.clear()

    def acknowledged(self, transfer_id: bytes, pieces: list[list[int]], *, in_flight_bytes: int) -> None:
        """Pieces have arrived whole; `in_flight_bytes` of what that connection carried are accounted for."""
        with self._changed:
            self._in_flight_bytes -= in_flight_bytes
            sending = self._sendings.get(transfer_id)
            if sending is None or not sending.accepted or sending.ended:
                return
            for index, offset, length in pieces:
                new = sending.acked[index].add(offset, offset + length)
                sending.acked_bytes += new
                self._acknowledged_bytes += new
            total = sending.acked_bytes
        self._on_event(SendProgress(transfer_id, total, time.monotonic_ns()))

    def again(self, transfer_id: bytes, index: int, offset: int, length: int) -> None:
        with self._changed:
            sending = self._sendings.get(transfer_id)
            if sending is not None and sending.accepted and not sending.ended:
                self._enqueue(sending, index, offset, offset + length)
                self._changed.notify()

    def done(self, transfer_id: bytes, wire_bytes: int, checksum_failures: int) -> None:
        with self._changed:
            sending = self._sendings.get(transfer_id)
            if sending is not None and not sending.ended:  # the last acknowledgements may come after this
                self._acknowledged_bytes += sending.missing_bytes - sending.acked_bytes
                sending.acked_bytes = sending.missing_bytes
        if sending is not None:
            self._end(sending, SendCompleted(transfer_id, TransferStats(wire_bytes, checksum_failures)))

    def refused(self, transfer_id: bytes, reason: str, message: str) -> None:
        with self._changed:
            sending = self._sendings.get(transfer_id)
        if sending is not None:
            self._end(sending, SendFailed(transfer_id, reason, message))

    def _end(self, sending: _Sending, event: SendCompleted | SendFailed | None) -> None:
        transfer_id = sending.transfer.transfer_id
        with self._changed:
            first = not sending.ended
            sending.ended = True
            free = sending.num_users == 0 and self._sendings.get(transfer_id) is sending
            if free:
                del self._sendings[transfer_id]
            with contextlib.suppress(ValueError):
                self._to_open.remove(sending)
            lines = list(self._lines)
        for line in lines:
            line.forget(transfer_id)
        if first and event is not None:
            self._on_event(event)
        if free:
            self._on_event(SendMemoryFree(transfer_id))

    def forgotten(self, num_bytes: int) -> None:
        """Bytes in flight of a transfer that has ended."""
        with self._changed:
            self._in_flight_bytes -= num_bytes


class _Line:
    """One connection of a link: this thread writes, a second one reads."""

    def __init__(self, link: Link, connection: Connection) -> None:
        self._link = link
        self._connection = connection
        self._lock = threading.Lock()
        self._unacknowledged: dict[tuple[bytes, int, int], _Work] = {}
        self._alive = threading.Event()

    def run(self) -> None:
        """Send until the connection is lost.

        Raises:
            OSError: it is.
        """
        self._link.connected(self)
        self._alive.set()
        reader = threading.Thread(target=self._read_forever, name="send-read", daemon=True)
        reader.start()
        try:
            while True:
                self._send(self._link.next_frame(self._alive, SILENCE_SECONDS / 3))
        finally:
            self._connection.close()
            reader.join()
            self._link.lost(self, list(self._unacknowledged.values()))

    def _send(self, frame: bytes | _Sending | _Work | None) -> None:
        if frame is None:
            self._connection.write(Header(FrameType.PING, 0).encode())
        elif isinstance(frame, bytes):
            self._connection.write(frame)
        elif isinstance(frame, _Sending):
            transfer = frame.transfer
            body = [transfer.open_body, _sizes(transfer.object_bytes), max(0.1, frame.deadline - time.monotonic())]
            self._connection.write(control(FrameType.OPEN, body, transfer_id=transfer.transfer_id))
        else:
            self._send_chunk(frame)

    def _send_chunk(self, work: _Work) -> None:
        transfer = work.sending.transfer
        with self._lock:
            self._unacknowledged[transfer.transfer_id, work.object, work.start] = work
        try:
            payload = transfer.source(work.object)[work.start : work.end]
            checksum = xxhash.xxh3_64_intdigest(payload)
            header = Header(FrameType.CHUNK, len(payload), transfer.transfer_id, work.object, work.start, checksum)
            self._connection.write(header.encode(), payload)
            payload.release()
        finally:
            self._link.sent(work)

    def _read_forever(self) -> None:
        try:
            while True:
                self._heard(self._connection.read_header())
        except (OSError, RemoteProtocolError, TypeError, ValueError, KeyError):
            self._alive.clear()
            self._connection.close()
            self._link.wake()

    def _heard(self, header: Header) -> None:
        if header.type is FrameType.PONG:
            return
        body = self._connection.read_body(header)
        if header.type is FrameType.ACK:
            self._acknowledged(header.transfer_id, body)
        elif header.type is FrameType.HAVE:
            self._link.have(header.transfer_id, body[0], body[1])
        elif header.type is FrameType.AGAIN:
            self._link.again(header.transfer_id, *body)
        elif header.type is FrameType.DONE:
            self._link.done(header.transfer_id, *body)
        elif header.type in (FrameType.CANCEL, FrameType.ERROR):
            self._link.refused(header.transfer_id, str(body[0]), str(body[1]))
        else:
            raise RemoteProtocolError("order", f"{header.type.name} from a receiver")

    def _acknowledged(self, transfer_id: bytes, pieces: list[list[int]]) -> None:
        with self._lock:
            popped = [self._unacknowledged.pop((transfer_id, index, offset), None) for index, offset, _ in pieces]
        landed = sum(work.end - work.start for work in popped if work is not None)
        self._link.acknowledged(transfer_id, pieces, in_flight_bytes=landed)

    def forget(self, transfer_id: bytes) -> None:
        """The transfer has ended: nothing of it is sent again."""
        with self._lock:
            keys = [key for key in self._unacknowledged if key[0] == transfer_id]
            gone = sum(work.end - work.start for work in map(self._unacknowledged.pop, keys))
        self._link.forgotten(gone)

    def tcp_info(self) -> TcpInfo | None:
        return self._connection.tcp_info()

    def close(self) -> None:
        self._connection.close()


def _sizes(object_bytes: Sequence[int]) -> list[list[int]]:
    """Sizes as [size, count] runs."""
    return [[size, len(list(same))] for size, same in itertools.groupby(object_bytes)]
