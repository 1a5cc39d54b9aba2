"""The sending end of the wire: one queue of ready bytes towards a peer, several connections that take from it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prfaas import logs
from prfaas.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from prfaas.transport import handshake, messages
from prfaas.transport.area import Area, Slab
from prfaas.transport.chunker import Chunk, Chunker
from prfaas.transport.connection import Connection, make_socket
from prfaas.transport.connection_policy import FIRST_CONNECTIONS, connection_count
from prfaas.transport.handshake import Identity
from prfaas.transport.inbound import TransferStats
from prfaas.transport.line import Job, Line
from prfaas.transport.link_meter import LinkMeter, LinkSample
from prfaas.transport.link_state import LinkState, retransmit_ratio
from prfaas.transport.messages import MAX_BODY_BYTES, Done, Ending, Have
from prfaas.transport.object_sizes import ObjectSizes
from prfaas.transport.ordered_events import OrderedEvents
from prfaas.transport.outbound import (
    Outgoing,
    SendAccepted,
    SendCompleted,
    SendEvent,
    SendFailed,
    SendMemoryFree,
    SendProgress,
)
from prfaas.transport.ranges import Ranges
from prfaas.transport.wire import FrameType, Header
from prfaas.types import FailureReason

__all__ = [
    "Link",
    "LinkConfig",
    "Outgoing",
    "SendAccepted",
    "SendCompleted",
    "SendEvent",
    "SendFailed",
    "SendMemoryFree",
    "SendProgress",
]

_log = logs.get("transport")
TICK_SECONDS = 0.05
KEEP_WARM_SECONDS = 600.0  # lost connections of a link are made again so long after its last transfer
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.05, 1.0
CLOSE_SECONDS = 15.0
STUCK_MEMORY_SECONDS = 1.0
MAX_FRAMES = 4096  # waiting for a connection; the oldest are dropped, whose transfers end by their deadline


@dataclass(frozen=True)
class LinkConfig:
    """How a link is made."""

    num_connections: int = 0  # 0: as many as the round trip asks for
    max_bytes_per_second: float = 0.0  # of payload and frames, over all connections; 0: as fast as the link allows
    congestion_control: str = "bbr"
    reconnect_seconds: float = 3.0
    insecure_plaintext: bool = False


@dataclass(eq=False)
class _Sending:
    transfer: Outgoing
    sizes: ObjectSizes
    opened_at: float
    is_accepted: bool = False  # the peer has answered the latest OPEN
    was_accepted: bool = False
    ready: Area = field(default_factory=Area)
    acked: Area = field(default_factory=Area)
    held: Ranges = field(default_factory=Ranges)
    missing_bytes: int = 0  # that must travel
    unready_bytes: int = 0  # of those
    said_end: bool = False
    num_users: int = 0  # threads that read its memory
    ended_at: float | None = None

    @property
    def has_ended(self) -> bool:
        return self.ended_at is not None

    @property
    def id(self) -> bytes:
        return self.transfer.transfer_id

    @property
    def deadline(self) -> float:
        return self.opened_at + self.transfer.deadline_seconds

    @property
    def awaits_answer(self) -> bool:
        """Whether the next word is the peer's: losing a connection may have lost it."""
        return not self.is_accepted or self.acked.num_bytes == self.missing_bytes

    def wanted(self, slab: Slab) -> Iterator[Slab]:
        """The parts of a slab whose objects the peer does not hold."""
        for first, last in self.held.missing(slab.first, slab.last):
            yield Slab(first, last - first, slab.offset, slab.length)


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
        """Events come from the link's threads, in order, with none of its locks held."""
        self.address = address
        self._config = config
        self._identity = Identity(local_name, key)
        self._peer_name = peer_name
        self._events: OrderedEvents[SendEvent] = OrderedEvents(on_event)
        self._changed = threading.Condition(threading.Lock())
        self._sendings: dict[bytes, _Sending] = {}
        self._keeps_warm = True
        self._meter = LinkMeter()
        self._counted: tuple[int, ...] = (0, 0, 0)  # bytes delivered to the peer's kernel, sent, retransmitted
        self._num_wanted = config.num_connections or FIRST_CONNECTIONS
        self._chunker = Chunker(self._num_wanted)
        self._frames: deque[bytes] = deque(maxlen=MAX_FRAMES)  # control frames that any connection may carry
        self._to_open: dict[bytes, _Sending] = {}  # in order
        self._lines: set[Line] = set()
        self._boot_id: bytes | None = None  # of the peer's process
        self._generation = 0
        self._last_transfer_at = time.monotonic()
        self._disconnected_since: float | None = time.monotonic()
        self._last_error = ""
        self._acknowledged_bytes = 0
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []

    # What the agent says

    def open(self, transfer: Outgoing) -> None:
        """Offer a transfer to the peer. What `ready` names leaves once the peer has said what it holds."""
        sending = _Sending(transfer, ObjectSizes.of(transfer.object_bytes), time.monotonic())
        with self._changed:
            if transfer.transfer_id in self._sendings:
                raise LocalProtocolError(f"transfer {transfer.transfer_id.hex()} is open already")
            self._sendings[sending.id] = sending
            self._chunker.add(sending.id, priority=transfer.priority)
            self._to_open[sending.id] = sending
            if self._is_closed.is_set():
                self._end(sending, SendFailed(sending.id, "shutdown", "this agent stops"))
            elif len(transfer.open_body) > MAX_BODY_BYTES:
                self._end(sending, SendFailed(sending.id, "protocol", "its OPEN is longer than the wire allows"))
            elif not self._threads:
                self._start()
            self._changed.notify_all()
        self._events.tell()

    def _start(self) -> None:
        self._start_thread(self._watch_forever)
        self._start_connecting()

    def _start_connecting(self) -> None:
        """Have a thread for every connection that is wanted."""
        for number in range(len(self._threads) - 1, self._num_wanted):
            self._start_thread(self._connect_forever, number)

    def _start_thread(self, target: Callable[..., None], *arguments: int) -> None:
        thread = threading.Thread(target=target, args=arguments, name=f"send-{self._peer_name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def ready(
        self, transfer_id: bytes, *, first_object: int, num_objects: int, offset_bytes: int, length_bytes: int
    ) -> None:
        """This byte range of each of these objects may leave now."""
        slab = Slab(first_object, num_objects, offset_bytes, length_bytes)
        with self._changed:
            sending = self._sendings.get(transfer_id)
            if sending is None or sending.has_ended:
                return
            if not sending.sizes.holds(slab):
                raise LocalProtocolError(f"no object of transfer {transfer_id.hex()} has {slab}")
            fresh = list(sending.ready.missing(slab))
            sending.ready.add(slab)
            if sending.is_accepted:
                self._queue(sending, fresh)
                self._changed.notify_all()

    def _queue(self, sending: _Sending, slabs: list[Slab]) -> None:
        for slab in slabs:
            for wanted in sending.wanted(slab):
                sending.unready_bytes -= wanted.num_bytes
                for gap in sending.acked.missing(wanted):
                    self._chunker.ready(sending.id, gap)

    def set_priority(self, transfer_id: bytes, priority: int) -> None:
        """Change a transfer's share of the link from here on."""
        with self._changed:
            if transfer_id in self._sendings:
                self._chunker.set_priority(transfer_id, priority)

    def cancel(self, transfer_id: bytes, reason: FailureReason, message: str) -> None:
        """End a transfer; SendFailed and SendMemoryFree follow, the peer hears of it."""
        with self._changed:
            sending = self._sendings.get(transfer_id)
            if sending is None or sending.has_ended:
                return
            ending = Ending(reason, message)
            self._frames.append(messages.encode_ending(FrameType.CANCEL, transfer_id, ending))
            self._changed.notify()
            self._end(sending, SendFailed(transfer_id, reason, message))
        self._events.tell()

    def close(self) -> None:
        """End every transfer and every thread."""
        with self._changed:
            self._is_closed.set()
            for sending in list(self._sendings.values()):
                self._end(sending, SendFailed(sending.id, "shutdown", "this agent stops"))
            for line in self._lines:
                line.abort()
            self._changed.notify_all()
        self._events.tell()
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    def snapshot(self) -> LinkState:
        """The link's figures; costs a few microseconds a connection."""
        with self._changed:
            infos = [info for line in self._lines if (info := line.tcp_info()) is not None]
            return LinkState(
                peer=self._peer_name,
                address=self.address,
                num_connections=len(self._lines),
                is_down=not self._lines and bool(self._last_error) and self._is_wanted(),
                num_transfers=len(self._sendings),
                queued_bytes=self._chunker.queued_bytes,
                unacknowledged_bytes=sum(line.in_flight_bytes for line in self._lines),
                acknowledged_bytes=self._acknowledged_bytes,
                rtt_seconds=max((info.rtt_seconds for info in infos), default=0.0),
                min_rtt_seconds=min((info.min_rtt_seconds for info in infos), default=0.0),
                retransmit_ratio=retransmit_ratio(infos),
                **vars(self._meter.health),
                pacing_bytes_per_second=sum(info.max_pacing_bytes_per_second for info in infos),
            )

    # Threads

    def _watch_forever(self) -> None:
        while not self._is_closed.wait(TICK_SECONDS):
            for transfer_id, reason in self._late(time.monotonic()):
                message = f"{self._peer_name} at {self.address} did not take it in time {self._last_error}".rstrip()
                self.cancel(transfer_id, reason, message)
            self._free_stuck_memory(time.monotonic())
            self._measure(time.monotonic())

    def _measure(self, now: float) -> None:
        with self._changed:
            lines = [(line, info) for line in self._lines if (info := line.tcp_info()) is not None]
            for line, info in lines:
                self._counted = tuple(map(sum, zip(self._counted, info.grown_since(line.seen), strict=True)))
                line.seen = info
            delivered, sent, retransmitted = self._counted
            sample = LinkSample(
                now,
                delivered_bytes=delivered,
                sent_bytes=sent,
                retransmitted_bytes=retransmitted,
                queued_bytes=self._chunker.queued_bytes,
                unacknowledged_bytes=sum(line.in_flight_bytes for line, _ in lines),
                rtt_seconds=max((info.rtt_seconds for _, info in lines), default=0.0),
                min_rtt_seconds=min((info.min_rtt_seconds for _, info in lines), default=0.0),
            )
        self._meter.add(sample)

    def _free_stuck_memory(self, now: float) -> None:
        """A peer that takes nothing does not keep an ended transfer's memory: the connection goes."""
        with self._changed:
            stuck = {
                its.id for its in self._sendings.values() if its.ended_at and now - its.ended_at > STUCK_MEMORY_SECONDS
            }
            for line in self._lines:
                if line.reads in stuck:
                    line.abort()

    def _late(self, now: float) -> list[tuple[bytes, FailureReason]]:
        with self._changed:
            reasons = [(its.id, self._lateness(its, now)) for its in self._sendings.values() if not its.has_ended]
        return [(transfer_id, reason) for transfer_id, reason in reasons if reason is not None]

    def _lateness(self, sending: _Sending, now: float) -> FailureReason | None:
        if now >= sending.deadline:
            return "deadline"
        since = self._disconnected_since
        is_gone = since is not None and now - max(since, sending.opened_at) >= self._config.reconnect_seconds
        return "unreachable" if is_gone else None

    def _connect_forever(self, number: int) -> None:
        pause = FIRST_RETRY_SECONDS
        while not self._is_closed.is_set():
            self._wait_until_wanted(number)
            try:
                self._connect_once(number)
                pause = FIRST_RETRY_SECONDS
            except (OSError, RemoteProtocolError, ConfigError) as error:
                self._last_error = f"({error})"
                self._is_closed.wait(pause)
                pause = min(2 * pause, MAX_RETRY_SECONDS)

    def _wait_until_wanted(self, number: int) -> None:
        """Return when a connection of this number is wanted, or the link is closed."""
        with self._changed:
            while not ((number < self._num_wanted and self._is_wanted()) or self._is_closed.is_set()):
                self._changed.wait(MAX_RETRY_SECONDS)

    def _is_wanted(self) -> bool:
        """Whether somebody sends, or has sent not long ago: then connections are kept, and made again."""
        warm = self._keeps_warm and time.monotonic() - self._last_transfer_at < KEEP_WARM_SECONDS
        return bool(self._sendings) or warm

    def _connect_once(self, number: int) -> None:
        """Serve one connection until it is lost, by the peer's going or by our closing."""
        sock = make_socket(
            self.address,
            congestion_control=self._config.congestion_control,
            insecure_plaintext=self._config.insecure_plaintext,
        )
        connection = Connection(sock, state="challenge")
        try:
            challenge = handshake.dial(connection, self._identity, peer_name=self._peer_name)
            line = self._connected(connection, challenge.boot_id, number)
            if line is None:
                return
            try:
                line.run()
            except OSError as error:
                if self._is_wanted():
                    self._last_error = f"({error})"
            finally:
                self._lost(line)
        finally:
            connection.close()

    # Lines come and go

    def _connected(self, connection: Connection, boot_id: bytes, number: int) -> Line | None:
        """A line for a new connection, or None when there are enough."""
        with self._changed:
            if boot_id != self._boot_id:
                self._peer_restarted(boot_id)
            if not self._lines and not self._config.num_connections:
                self._count_connections(connection)
            if number >= self._num_wanted:
                return None
            line = Line(self, connection, generation=self._generation)
            self._lines.add(line)
            self._disconnected_since = None
            self._last_error = ""
            self._share_rate()
            if self._is_closed.is_set():
                line.abort()
            return line

    def _count_connections(self, connection: Connection) -> None:
        """Decide, from the first connection, how many there should be."""
        info = connection.tcp_info()
        wanted = connection_count(
            rtt_seconds=info.min_rtt_seconds if info else 0.0, congestion_control=connection.congestion_control()
        )
        if wanted.count != self._num_wanted:
            _log.info("link.connections", peer=self._peer_name, count=wanted.count, reason=wanted.reason)
        self._num_wanted = self._chunker.num_connections = wanted.count
        self._keeps_warm = wanted.keeps_warm
        if not self._is_closed.is_set():
            self._start_connecting()

    def _share_rate(self) -> None:
        for line in self._lines if self._config.max_bytes_per_second else ():
            line.pace(self._config.max_bytes_per_second / len(self._lines))

    def _peer_restarted(self, boot_id: bytes) -> None:
        """Another process answers: what the earlier one acknowledged is lost, its connections are dead."""
        self._boot_id = boot_id
        self._generation += 1
        for line in self._lines:
            line.abort()
        for sending in self._sendings.values():
            self._open_again(sending)

    def _lost(self, line: Line) -> None:
        """A connection went: what it carried goes to the others; who waits for an answer asks again."""
        with self._changed:
            self._lines.discard(line)
            self._share_rate()
            is_last = not self._lines
            if is_last:
                self._disconnected_since = time.monotonic()
            for sending in self._sendings.values():
                if is_last or sending.awaits_answer:
                    self._open_again(sending)
            if line.generation == self._generation:
                self._put_back(line.unacknowledged())
            self._changed.notify_all()

    def _open_again(self, sending: _Sending) -> None:
        sending.is_accepted = False
        if not sending.has_ended:
            self._to_open[sending.id] = sending
        self._chunker.clear(sending.id)  # HAVE tells what is still to be sent

    def _put_back(self, chunks: list[Chunk]) -> None:
        for chunk in reversed(chunks):
            sending = self._sendings.get(chunk.transfer_id)
            if sending is not None and sending.is_accepted and not sending.has_ended:
                self._chunker.put_back(chunk)

    # What the lines ask for and report (see `line.Work`)

    def next_job(self, line: Line, timeout_seconds: float) -> Job | None:
        """What to send next, or None when nothing came up in time.

        Raises:
            OSError: the line is dead, or nobody has wanted it for long.
        """
        end = time.monotonic() + timeout_seconds
        with self._changed:
            while line.is_alive and self._is_wanted():
                frames = self._next_frames()
                if frames or self._chunker.has_work():
                    return Job(frames)
                left = end - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
        raise ConnectionAbortedError("the connection was lost, or is not wanted")

    def _next_frames(self) -> list[bytes]:
        if self._frames:
            return [self._frames.popleft()]
        if self._to_open:
            return [self._open_frame(self._to_open.pop(next(iter(self._to_open))))]
        return []

    def _open_frame(self, sending: _Sending) -> bytes:
        left = max(0.1, sending.deadline - time.monotonic())
        transfer = sending.transfer
        opened = messages.Open(sending.sizes, max(0, transfer.priority), left, transfer.open_body)
        return messages.encode_open(sending.id, opened)

    def take_chunk(self, line: Line) -> tuple[Chunk, Callable[[int], memoryview]] | None:
        """The next bytes to send; their memory is in use until `sent`."""
        with self._changed:
            chunk = self._chunker.take() if line.is_alive else None
            if chunk is None:
                return None
            sending = self._sendings[chunk.transfer_id]
            sending.num_users += 1
            line.reads = sending.id
            return chunk, sending.transfer.source

    def sent(self, line: Line, chunk: Chunk) -> None:
        """The line has read the chunk's memory for the last time."""
        with self._changed:
            line.reads = None
            sending = self._sendings[chunk.transfer_id]
            sending.num_users -= 1
            if sending.has_ended:
                self._free(sending)
            else:
                self._say_end(sending)
        self._events.tell()

    def _say_end(self, sending: _Sending) -> None:
        is_all = sending.is_accepted and not sending.unready_bytes and self._chunker.is_drained(sending.id)
        if is_all and not sending.said_end:
            sending.said_end = True
            self._frames.append(Header(FrameType.END, 0, sending.id, offset=sending.missing_bytes).encode())
            self._changed.notify()

    def acknowledged(self, line: Line, landed: list[Chunk], changed: list[Chunk]) -> None:
        """Chunks have arrived whole, and others changed, which leave again."""
        now = time.monotonic_ns()
        with self._changed:
            if line.generation != self._generation:
                return
            for chunk in landed:
                sending = self._sendings.get(chunk.transfer_id)
                if sending is not None and not sending.has_ended:
                    self._acknowledged_bytes += sending.acked.add(chunk.slab)
            for transfer_id in dict.fromkeys(chunk.transfer_id for chunk in landed):
                sending = self._sendings.get(transfer_id)
                if sending is not None and not sending.has_ended:
                    self._events.put(SendProgress(transfer_id, sending.acked.num_bytes, now))
            self._put_back(changed)
            if changed:
                self._changed.notify_all()
        self._events.tell()

    def have(self, line: Line, transfer_id: bytes, have: Have) -> None:
        """The peer has accepted a transfer and says what it holds; all else that is ready leaves."""
        with self._changed:
            sending = self._sendings.get(transfer_id)
            current = line.generation == self._generation
            if sending is None or sending.has_ended or sending.is_accepted or not current:
                return
            _check_have(sending.sizes, have)
            sending.is_accepted = True
            sending.said_end = False
            sending.held, sending.acked = have.held, Area(have.arrived)
            sending.missing_bytes = sending.sizes.total_bytes - sending.sizes.bytes_of(have.held)
            sending.unready_bytes = sending.missing_bytes
            self._queue(sending, list(sending.ready.slabs()))
            if not sending.was_accepted:
                sending.was_accepted = True
                self._events.put(SendAccepted(transfer_id, sending.missing_bytes, have.held.copy()))
            self._changed.notify_all()
        self._events.tell()

    def done(self, transfer_id: bytes, done: Done) -> None:
        """The peer has every byte. The last acknowledgements may come after this."""
        with self._changed:
            sending = self._sendings.get(transfer_id)
            if sending is not None and not sending.has_ended:
                self._acknowledged_bytes += sending.missing_bytes - sending.acked.num_bytes
                stats = TransferStats(done.wire_bytes, done.checksum_failures)
                self._end(sending, SendCompleted(transfer_id, stats))
        self._events.tell()

    def refused(self, transfer_id: bytes, ending: Ending) -> None:
        """The peer gives a transfer up, or does not take it."""
        with self._changed:
            sending = self._sendings.get(transfer_id)
            if sending is not None:
                self._end(sending, SendFailed(transfer_id, ending.reason, ending.message))
        self._events.tell()

    def reopen(self, transfer_id: bytes) -> None:
        """The peer does not know a transfer that it was sent chunks of."""
        with self._changed:
            sending = self._sendings.get(transfer_id)
            if sending is not None and sending.is_accepted:
                self._open_again(sending)
                self._changed.notify()

    def wake(self) -> None:
        """Have every line look at what there is to do."""
        with self._changed:
            self._changed.notify_all()

    # Ending, with the lock held

    def _end(self, sending: _Sending, event: SendCompleted | SendFailed) -> None:
        if sending.has_ended:
            return
        sending.ended_at = time.monotonic()
        self._chunker.remove(sending.id)
        self._to_open.pop(sending.id, None)
        self._events.put(event)
        self._free(sending)

    def _free(self, sending: _Sending) -> None:
        if sending.num_users == 0 and self._sendings.pop(sending.id, None) is not None:
            self._last_transfer_at = time.monotonic()
            self._events.put(SendMemoryFree(sending.id))
            if not self._keeps_warm:
                self._changed.notify_all()


def _check_have(sizes: ObjectSizes, have: Have) -> None:
    last_held = have.held.to_list()[-1][1] if len(have.held) else 0
    if last_held > len(sizes) or not all(sizes.holds(slab) for slab in have.arrived):
        raise RemoteProtocolError("range", "HAVE of objects that the transfer does not have")
