"""Workers of a link, one per connection: one thread writes frames, a second one reads the peer's answers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.errors import LocalProtocolError, RemoteProtocolError
from prfaas.transport.codec.packing import CODECS, TRIAL_BYTES, Packer, PackFormat, PackingCost, pack_formats
from prfaas.transport.congestion.stall_detector import ConnectionLiveness, StallDetector
from prfaas.transport.net.connection import Connection
from prfaas.transport.net.sockets import TcpInfo
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.wire import NO_TRANSFER, FrameType, Header, chunk_checksum, chunk_header, packed_header
from prfaas.transport.ranges import first_bytes
from prfaas.transport.sender.api import SendRequest
from prfaas.transport.sender.chunker import Chunk

if TYPE_CHECKING:
    from prfaas.transport.sender.link import Link

WRITABLE_SECONDS = 0.5  # Longest wait for buffer space before the worker looks for other work.
MAX_UNACKNOWLEDGED = 4096  # Chunks per connection. Only very small chunks reach it before the kernel's buffers fill.
LAST_ACK_SECONDS = 10.0  # Longest wait for the last acknowledgement on a connection that is being replaced.
_PING = Header(FrameType.PING, 0).encode()


@dataclass(frozen=True)
class ChunkTask:
    """Chunk to send. `pack_format` None sends it unpacked; `is_trial` also tries every pack format on its first bytes."""

    chunk: Chunk
    request: SendRequest
    pack_format: PackFormat | None = None
    is_trial: bool = False
    dscp: int = 0


class ConnectionWorker:
    """Sends frames of one link over one connection, which has completed its handshake."""

    def __init__(
        self, link: Link, connection: Connection, *, generation: int, capabilities: Sequence[str] = ()
    ) -> None:
        """Create a worker.

        Args:
            link: Source of the work.
            connection: Connection to write to and read from.
            generation: Number of the peer's process, counted by the link.
            capabilities: Capabilities that both ends have.
        """
        self.generation = generation
        self.is_alive = True
        self.in_flight_bytes = 0
        self.seen: TcpInfo | None = None  # Kernel figures at the last sample.
        self.liveness = ConnectionLiveness(began_at=time.monotonic())
        self.reading: bytes | None = None  # Transfer whose memory the worker reads.
        self.last_control: bytes | None = None  # Transfer of the latest control frame, unless a chunk followed.
        self._pack_formats = pack_formats([name for name in CODECS if name in capabilities])
        self._link = link
        self.connection = connection
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._in_flight: deque[tuple[float, Chunk]] = deque()  # Send times and chunks, oldest first.
        self._is_retiring = False
        self._refusal: RemoteProtocolError | None = None  # Violation or refusal that ends the connection.
        self._num_acknowledged = 0
        self._packer = Packer()
        self._damaged: set[int] = set()  # Numbers of chunks that did not match their checksum.

    @property
    def can_pack(self) -> bool:
        """Return whether both ends have a codec."""
        return bool(self._pack_formats)

    def run(self) -> None:
        """Send until the connection is lost, or has reached its age limit and everything is acknowledged.

        Raises:
            OSError: the connection is lost.
            RemoteProtocolError: the peer refuses or violates the protocol, and can still be told so.
        """
        reader = threading.Thread(target=self._read_forever, name="send-read", daemon=True)
        reader.start()
        try:
            self._write_until_worn(reader)
        except OSError:
            if self._refusal is None:
                raise
        if self._refusal is not None:
            raise self._refusal

    def unacknowledged(self) -> list[Chunk]:
        """Return the chunks that were sent and may not have arrived."""
        with self._lock:
            return [chunk for _, chunk in self._in_flight]

    def update_liveness(self, now: float) -> ConnectionLiveness:
        """Return the signs of life, updated with the latest kernel figures."""
        if self.seen is not None:
            unsent, delivered = self.seen.unsent_bytes, self.seen.delivered_segments
            self.liveness.observe_kernel(unsent_bytes=unsent, delivered_segments=delivered, now=now)
        return self.liveness

    def transfer_leaving(self, now: float) -> bytes | None:
        """Return the transfer of the last control frame while the peer is still taking that frame."""
        is_all_sent = self.seen is None or not self.seen.unsent_bytes
        return None if is_all_sent or not self.liveness.is_moving(now) else self.last_control

    def ping(self) -> None:
        """Send a PING, if the kernel takes it at once and none is unanswered."""
        if self.liveness.pinged_at is not None:
            return
        self.liveness.pinged(time.monotonic())
        # The worker's own threads notice a lost connection.
        with contextlib.suppress(OSError):
            if not self.connection.write_at_once(_PING):
                self.liveness.pinged_at = None

    def abort(self) -> None:
        """End the connection. The worker's own threads clean up."""
        self.is_alive = False
        self.connection.abort()

    def _end(self) -> None:
        """Stop sending. Leaves the connection open if the peer must still be told of a violation."""
        self.is_alive = False
        if self._refusal is None:
            self.connection.abort()

    # Writing

    def _write_until_worn(self, reader: threading.Thread) -> None:
        try:
            while not self.connection.is_worn:
                self._write_next(has_work=self._link.has_work(self))
            self._is_retiring = True
            if self._in_flight:
                reader.join(LAST_ACK_SECONDS)
        finally:
            self._end()
            reader.join()

    def _write_next(self, *, has_work: bool) -> None:
        if not has_work:
            self.liveness.pinged(time.monotonic())
            self.connection.write(_PING)
        elif self._wait_for_room() and self.connection.wait_writable(WRITABLE_SECONDS):
            work = self._link.take(self)
            if isinstance(work, bytes):
                self.connection.write(work)
            elif work is not None:
                self._send(work)

    def _wait_for_room(self) -> bool:
        """Wait a moment until fewer than MAX_UNACKNOWLEDGED chunks are in flight. Returns whether that is so."""
        with self._has_room:
            return self._has_room.wait_for(lambda: len(self._in_flight) < MAX_UNACKNOWLEDGED, WRITABLE_SECONDS)

    def _send(self, task: ChunkTask) -> None:
        chunk, slab = task.chunk, task.chunk.slab
        self.connection.mark(task.dscp)
        costs: list[PackingCost] = []
        with self._lock:
            self._in_flight.append((time.monotonic(), chunk))
            self.liveness.oldest_at = self._in_flight[0][0]
            self.in_flight_bytes += slab.num_bytes
        try:
            source = task.request.source
            views = [source(index)[slab.offset : slab.end] for index in range(slab.first, slab.last)]
            if sum(map(len, views)) != slab.num_bytes:
                raise LocalProtocolError(f"the memory of {slab} is too short")
            self._write(task, views, costs)
            for view in views:
                view.release()
        finally:
            self._link.sent(self, chunk, costs)

    def _write(self, task: ChunkTask, views: list[memoryview], costs: list[PackingCost]) -> None:
        """Write a chunk, packed if that makes it shorter. Appends the costs of packing to `costs`."""
        transfer_id, slab = task.chunk.transfer_id, task.chunk.slab
        if task.is_trial:
            trial_views = first_bytes(views, TRIAL_BYTES)
            for pack_format in self._pack_formats:
                self._pack(trial_views, pack_format, costs)
        checksum = chunk_checksum(transfer_id, slab, views)
        packed = None
        if task.pack_format is not None and task.pack_format in self._pack_formats:
            packed = self._pack(views, task.pack_format, costs)
        if packed is None:
            self.connection.write(chunk_header(transfer_id, slab, checksum), *views)
        else:
            self.connection.write(packed_header(transfer_id, slab, checksum, packed_bytes=len(packed)), packed)

    def _pack(self, views: list[memoryview], pack_format: PackFormat, costs: list[PackingCost]) -> bytes | None:
        """Return the packed bytes, or None if they are not shorter. Appends the cost to `costs`."""
        began, cpu_began = time.monotonic(), time.thread_time()
        raw = b"".join(views)
        packed = self._packer.pack(raw, pack_format)
        num_bytes = len(raw) if packed is None else len(packed)
        seconds, cpu_seconds = time.monotonic() - began, time.thread_time() - cpu_began
        costs.append(PackingCost(pack_format, len(raw), num_bytes, seconds, cpu_seconds))
        return packed

    # Reading

    def _read_forever(self) -> None:
        try:
            while self._in_flight or not self._is_retiring:
                self._handle(self._next_header())
        except OSError:
            pass
        except RemoteProtocolError as error:
            self._refusal = error
        finally:
            # Without a reader no acknowledgement would arrive, so the writer must stop too.
            self._end()
            self._link.wake()

    def _next_header(self) -> Header:
        """Read a header. The peer may be silent for as long as it takes what is sent to it."""
        while True:
            try:
                return self.connection.read_header()
            except BlockingIOError:
                if not self.liveness.is_moving(time.monotonic()):
                    raise

    def _handle(self, header: Header) -> None:
        kind, transfer_id = header.type, header.transfer_id
        payload = self.connection.read_payload(header)
        if kind is FrameType.ACK:
            self._acknowledge(header.offset)
        elif kind is FrameType.AGAIN:
            self._note_damaged(header.offset)
        elif kind is FrameType.HAVE:
            self._link.on_have(self, header, payload)
        elif kind is FrameType.DONE:
            self._link.on_done(transfer_id, messages.decode_done(payload))
        elif kind is FrameType.REOPEN:
            self._link.on_reopen(transfer_id)
        elif kind is FrameType.PONG:
            self.liveness.ponged()
        elif transfer_id == NO_TRANSFER:
            raise RemoteProtocolError("refused", messages.decode_ending(payload).message)
        else:
            self._link.on_refused(transfer_id, messages.decode_ending(payload, kind))

    def _note_damaged(self, number: int) -> None:
        with self._lock:
            if not self._num_acknowledged <= number < self._num_acknowledged + len(self._in_flight):
                raise RemoteProtocolError("ack", f"chunk {number} is not in flight")
            self._damaged.add(number)

    def _acknowledge(self, count: int) -> None:
        """Handle an ACK: the peer has processed the first `count` chunks of the connection."""
        landed: list[Chunk] = []
        damaged: list[Chunk] = []
        sent_at: list[float] = []
        with self._has_room:
            if not self._num_acknowledged <= count <= self._num_acknowledged + len(self._in_flight):
                raise RemoteProtocolError("ack", f"{count} chunks acknowledged, which were not all sent")
            while self._num_acknowledged < count:
                at, chunk = self._in_flight.popleft()
                sent_at.append(at)
                self.in_flight_bytes -= chunk.slab.num_bytes
                (damaged if self._num_acknowledged in self._damaged else landed).append(chunk)
                self._damaged.discard(self._num_acknowledged)
                self._num_acknowledged += 1
            if sent_at:
                oldest_at = self._in_flight[0][0] if self._in_flight else None
                self.liveness.acknowledged(sent_at[0], sent_at[-1], oldest_at=oldest_at, now=time.monotonic())
                self._has_room.notify()
        self._link.on_acknowledged(self, landed, damaged)


class ConnectionWorkers(set[ConnectionWorker]):
    """Workers of a link's connections. `Link` holds its lock around every call and passes monotonic seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.process: bytes | None = None  # Boot id of the peer's process that answered last.
        self.generation = 0  # Number of that process. Reports of workers of another generation do not count.
        self._stalls: StallDetector[ConnectionWorker] = StallDetector()

    def set_process(self, process: bytes) -> bool:
        """Note which process of the peer answers. A new process ends the connections to the previous one.

        Returns whether the process is new.
        """
        if process == self.process:
            return False
        self.process = process
        self.generation += 1
        self.abort()
        return True

    def abort(self) -> None:
        """End every connection."""
        for worker in self:
            worker.abort()

    def abort_readers(self, transfers: Set[bytes]) -> None:
        """End the connections that read the memory of any of these transfers."""
        for worker in self:
            if worker.reading in transfers:
                worker.abort()

    def heard_at(self, now: float) -> float:
        """Return when data of the peer arrived last, or the peer took bytes that waited here."""
        return max(
            (max(now - worker.connection.quiet_seconds(), worker.liveness.moved_at) for worker in self), default=now
        )

    @property
    def in_flight_bytes(self) -> int:
        """Bytes that were sent and are not acknowledged."""
        return sum(worker.in_flight_bytes for worker in self)

    @property
    def rtt_seconds(self) -> float:
        """Longest round-trip time at the last sample; 0 if unknown."""
        return max((worker.seen.rtt_seconds for worker in self if worker.seen), default=0.0)

    def is_any_slow(self, now: float) -> bool:
        """Return whether an old connection still moves bytes, so that the peer is slow but not unreachable."""
        return any(worker.liveness.is_slow(now) for worker in self)

    def transfers_leaving(self, now: float) -> set[bytes]:
        """Return the transfers whose latest control frame the peer is still taking."""
        return {leaving for worker in self if (leaving := worker.transfer_leaving(now)) is not None}

    def stalled(self, now: float) -> tuple[list[ConnectionWorker], list[ConnectionWorker]]:
        """Return the workers that are stalled, and the workers that should send a PING. Call often."""
        liveness = {worker: worker.update_liveness(now) for worker in self if worker.is_alive}
        stalled, wants_pings = self._stalls.check(liveness, now=now)
        return stalled, list(liveness) if wants_pings else []
