"""One connection of a link, sending side: this thread writes, a second one reads the answers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from prfaas.errors import LocalProtocolError, RemoteProtocolError
from prfaas.transport.codec import fp8
from prfaas.transport.codec.packing import CODECS, TRIAL_BYTES, Packer, PackFormat, PackingCost, pack_formats
from prfaas.transport.congestion.stall_detector import ConnectionLiveness, StallDetector
from prfaas.transport.net.connection import SILENCE_SECONDS, Connection, ConnectionStats, TcpHistory
from prfaas.transport.net.sockets import TcpInfo
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import Done, Ending
from prfaas.transport.protocol.wire import NO_TRANSFER, FrameType, Header, chunk_checksum, chunk_header, packed_header
from prfaas.transport.ranges import first_bytes
from prfaas.transport.sender.api import SendRequest
from prfaas.transport.sender.chunker import Chunk

WRITABLE_SECONDS = 0.5  # how long a connection waits for room before it looks at what there is to do again
MAX_UNACKNOWLEDGED = 4096  # chunks of a connection; the kernels' buffers are full before, but of very small ones
LAST_ACK_SECONDS = 10.0  # a connection that has served for long enough waits for its last acknowledgement
_PING = Header(FrameType.PING, 0).encode()


@dataclass(frozen=True)
class ChunkTask:
    """A chunk to send, of a transfer. `way`: how it is packed, None as it is; `is_trial`: its beginning is to be packed
    in every way."""

    chunk: Chunk
    transfer: SendRequest
    way: PackFormat | None = None
    is_trial: bool = False


class WorkSource(Protocol):
    """What a line does for: the link, seen from one of its lines."""

    def has_work(self, line: ConnectionWorker, timeout_seconds: float) -> bool: ...
    def take(self, line: ConnectionWorker) -> bytes | ChunkTask | None: ...
    def sent(self, line: ConnectionWorker, chunk: Chunk, samples: Sequence[PackingCost]) -> None: ...
    def acknowledged(self, line: ConnectionWorker, landed: list[Chunk], changed: list[Chunk]) -> None: ...
    def have(self, line: ConnectionWorker, header: Header, payload: bytearray) -> None: ...
    def done(self, transfer_id: bytes, done: Done) -> None: ...
    def refused(self, transfer_id: bytes, ending: Ending) -> None: ...
    def reopen(self, transfer_id: bytes) -> None: ...
    def may_send(self, line: ConnectionWorker, bytes_per_second: int) -> None: ...
    def wake(self) -> None: ...


class ConnectionWorker:
    """Frames of one link over one connection, which has been through its handshake."""

    def __init__(
        self, work: WorkSource, connection: Connection, *, generation: int, capabilities: Sequence[str] = ()
    ) -> None:
        """`generation` numbers the peer's processes as the link has met them; `capabilities` are those of both ends."""
        self.generation = generation
        self.is_alive = True
        self.in_flight_bytes = 0
        self.seen: TcpInfo | None = None  # the kernel's figures when they were last counted
        self.pulse = ConnectionLiveness(began_at=time.monotonic())
        self.recent = TcpHistory(self.pulse.began_at)
        self.reads: bytes | None = None  # the transfer whose memory it is sending from
        self.says: bytes | None = None  # the transfer of the control frame that it took, no bytes since
        self.casts = fp8.LOSSY_FP8 in capabilities
        self._ways = pack_formats([name for name in CODECS if name in capabilities])
        self._work = work
        self._connection = connection
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._in_flight: deque[tuple[float, Chunk]] = deque()  # when it left, and what; oldest first
        self._is_retiring = False
        self._refusal: RemoteProtocolError | None = None  # what one side holds against the other
        self._num_acknowledged = 0  # of all chunks sent on this connection
        self._packer = Packer()
        self._changed: set[int] = set()  # numbers of chunks that did not match their checksum

    @property
    def can_pack(self) -> bool:
        """Whether both ends have a codec."""
        return bool(self._ways)

    def run(self) -> None:
        """Send until the connection is lost, or has served for long enough and what it carried is acknowledged.

        Raises:
            OSError: it is lost.
            RemoteProtocolError: the peer breaks the protocol, and can still be told so, or refuses.
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
        """What was sent and may not have arrived."""
        with self._lock:
            return [chunk for _, chunk in self._in_flight]

    def tcp_info(self) -> TcpInfo | None:
        return self._connection.tcp_info()

    def state(self, now: float) -> ConnectionStats | None:
        """Its figures, for whoever looks for a bad path; None once it is closed."""
        addresses, info = self._connection.addresses(), self.tcp_info()
        if addresses is None or info is None:
            return None
        return ConnectionStats.of(
            addresses,
            info,
            recent=self.recent,
            pulse=self.pulse,
            unacknowledged_bytes=self.in_flight_bytes,
            now=now,
        )

    def search_rate(self) -> None:
        self._connection.search_rate()

    def pace(self, bytes_per_second: float) -> None:
        self._connection.pace(bytes_per_second)

    def look(self, now: float) -> ConnectionLiveness:
        """Its signs of life, with what the kernel has said of it last."""
        if self.seen is not None:
            its = self.seen
            self.pulse.saw(unsent_bytes=its.unsent_bytes, delivered_segments=its.delivered_segments, now=now)
        return self.pulse

    def leaving(self, now: float) -> bytes | None:
        """The transfer of the control frame that it took last, while the peer is still taking that."""
        is_all_sent = self.seen is None or not self.seen.unsent_bytes
        return None if is_all_sent or not self.pulse.is_moving(now) else self.says

    def ping(self) -> None:
        """Have the peer show that it answers on this connection, where the kernel takes a frame at once."""
        if self.pulse.pinged_at is not None:
            return
        self.pulse.pinged(time.monotonic())
        with contextlib.suppress(OSError):  # whoever serves it notices
            if not self._connection.write_at_once(_PING):
                self.pulse.pinged_at = None

    def abort(self) -> None:
        """End this line; its own thread cleans up."""
        self.is_alive = False
        self._connection.abort()

    def _end(self) -> None:
        """Carry nothing any more; whoever serves the connection closes it, and may tell the peer a refusal before."""
        self.is_alive = False
        if self._refusal is None:
            self._connection.abort()

    # Writing

    def _write_until_worn(self, reader: threading.Thread) -> None:
        try:
            while not self._connection.is_worn:
                self._do(has_work=self._work.has_work(self, SILENCE_SECONDS / 3))
            self._is_retiring = True
            if self._in_flight:
                reader.join(LAST_ACK_SECONDS)
        finally:
            self._end()
            reader.join()

    def _do(self, *, has_work: bool) -> None:
        if not has_work:
            self.pulse.pinged(time.monotonic())
            self._connection.write(_PING)
        elif self._has_room() and self._connection.wait_writable(WRITABLE_SECONDS):
            taken = self._work.take(self)
            if isinstance(taken, bytes):
                self._connection.write(taken)
            elif taken is not None:
                self._send(taken)

    def _has_room(self) -> bool:
        """Whether the peer acknowledges what it is sent; waits a moment for that."""
        with self._room:
            return self._room.wait_for(lambda: len(self._in_flight) < MAX_UNACKNOWLEDGED, WRITABLE_SECONDS)

    def _send(self, taken: ChunkTask) -> None:
        chunk, slab = taken.chunk, taken.chunk.slab
        samples: list[PackingCost] = []
        with self._lock:
            self._in_flight.append((time.monotonic(), chunk))
            self.pulse.oldest_at = self._in_flight[0][0]
            self.in_flight_bytes += slab.num_bytes
        try:
            source = taken.transfer.source
            views = [source(index)[slab.offset : slab.end] for index in range(slab.first, slab.last)]
            if sum(map(len, views)) != slab.num_bytes:
                raise LocalProtocolError(f"the memory of {slab} is too short")
            is_castable = self.casts and taken.transfer.castable.covers(slab.first, slab.last)
            if not is_castable or not self._write_cast(chunk, views):
                self._write(taken, views, samples)
            for view in views:
                view.release()
        finally:
            self._work.sent(self, chunk, samples)

    def _write(self, taken: ChunkTask, views: list[memoryview], samples: list[PackingCost]) -> None:
        """As it is, or packed; what packing took goes to `samples`."""
        transfer_id, slab = taken.chunk.transfer_id, taken.chunk.slab
        if taken.is_trial:
            samples += self._try(first_bytes(views, TRIAL_BYTES))
        checksum = chunk_checksum(transfer_id, slab, views)
        packed = self._pack(views, taken.way, samples) if taken.way in self._ways else None
        if packed is None:
            self._connection.write(chunk_header(transfer_id, slab, checksum), *views)
        else:
            self._connection.write(packed_header(transfer_id, slab, checksum, packed_bytes=len(packed)), packed)

    def _write_cast(self, chunk: Chunk, views: list[memoryview]) -> bool:
        """Cast to 8 bits, which loses some of each value; False: these bytes cannot be."""
        payload = fp8.cast(b"".join(views)) if chunk.slab.offset % fp8.VALUE_BYTES == 0 else None
        if payload is None:
            return False
        kept = memoryview(fp8.restore(payload))
        checksum = chunk_checksum(chunk.transfer_id, chunk.slab, [kept])
        head = packed_header(chunk.transfer_id, chunk.slab, checksum, packed_bytes=len(payload), kind=FrameType.LOSSY)
        self._connection.write(head, payload)
        return True

    def _try(self, beginning: list[memoryview]) -> list[PackingCost]:
        samples: list[PackingCost] = []
        for way in self._ways:
            self._pack(beginning, way, samples)
        return samples

    def _pack(self, views: list[memoryview], way: PackFormat | None, samples: list[PackingCost]) -> bytes | None:
        """The packed chunk, None when it is not shorter; what it took goes to `samples`."""
        if way is None:
            return None
        began, cpu_began = time.monotonic(), time.thread_time()
        raw = b"".join(views)
        packed = self._packer.pack(raw, way)
        size = len(raw) if packed is None else len(packed)
        seconds, cpu_seconds = time.monotonic() - began, time.thread_time() - cpu_began
        samples.append(PackingCost(way, len(raw), size, seconds, cpu_seconds))
        return packed

    # Reading

    def _read_forever(self) -> None:
        try:
            while self._in_flight or not self._is_retiring:
                self._heard(self._next_header())
        except OSError:
            pass
        except RemoteProtocolError as error:
            self._refusal = error
        finally:  # whatever ended it: nobody would hear acknowledgements any more
            self._end()
            self._work.wake()

    def _next_header(self) -> Header:
        """The peer may be silent while it is taking what is sent to it."""
        while True:
            try:
                return self._connection.read_header()
            except BlockingIOError:
                if not self.pulse.is_moving(time.monotonic()):
                    raise

    def _heard(self, header: Header) -> None:
        kind, transfer_id = header.type, header.transfer_id
        payload = self._connection.read_payload(header)
        if kind is FrameType.ACK:
            self._acknowledged(header.offset)
        elif kind is FrameType.AGAIN:
            self._came_changed(header.offset)
        elif kind is FrameType.HAVE:
            self._work.have(self, header, payload)
        elif kind is FrameType.DONE:
            self._work.done(transfer_id, messages.decode_done(payload))
        elif kind is FrameType.REOPEN:
            self._work.reopen(transfer_id)
        elif kind is FrameType.RATE:
            self._work.may_send(self, header.offset)
        elif kind is FrameType.PONG:
            self.pulse.ponged()
        elif transfer_id == NO_TRANSFER:
            raise RemoteProtocolError("refused", messages.decode_ending(payload).message)
        else:
            self._work.refused(transfer_id, messages.decode_ending(payload, kind))

    def _came_changed(self, number: int) -> None:
        with self._lock:
            if not self._num_acknowledged <= number < self._num_acknowledged + len(self._in_flight):
                raise RemoteProtocolError("ack", f"chunk {number} is not in flight")
            self._changed.add(number)

    def _acknowledged(self, count: int) -> None:
        """The first `count` chunks of this connection have been dealt with."""
        landed: list[Chunk] = []
        changed: list[Chunk] = []
        left_at: list[float] = []
        with self._room:
            if not self._num_acknowledged <= count <= self._num_acknowledged + len(self._in_flight):
                raise RemoteProtocolError("ack", f"{count} chunks acknowledged")
            while self._num_acknowledged < count:
                at, chunk = self._in_flight.popleft()
                left_at.append(at)
                self.in_flight_bytes -= chunk.slab.num_bytes
                (changed if self._num_acknowledged in self._changed else landed).append(chunk)
                self._changed.discard(self._num_acknowledged)
                self._num_acknowledged += 1
            if left_at:
                oldest_at = self._in_flight[0][0] if self._in_flight else None
                self.pulse.acknowledged(left_at[0], left_at[-1], oldest_at=oldest_at, now=time.monotonic())
                self._room.notify()
        self._work.acknowledged(self, landed, changed)


class ConnectionWorkers:
    """No threads and no locks of its own: `sender.Link` holds its lock around every call. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self.process: bytes | None = None  # names the one that has answered last
        self.generation = 0  # its number among those that have answered: of lines of another nothing counts any more
        self._lines: set[ConnectionWorker] = set()
        self._stalls: StallDetector[ConnectionWorker] = StallDetector()

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[ConnectionWorker]:
        return iter(self._lines)

    def __contains__(self, line: object) -> bool:
        return line in self._lines

    def add(self, line: ConnectionWorker) -> None:
        """A connection is made."""
        self._lines.add(line)

    def remove(self, line: ConnectionWorker) -> None:
        """It is gone."""
        self._lines.discard(line)

    def lead_to(self, process: bytes) -> bool:
        """This process of the peer answers; returns whether that is new. Connections to an earlier one are dead, and end."""
        if process == self.process:
            return False
        self.process = process
        self.generation += 1
        self.abort()
        return True

    def abort(self) -> None:
        """End every connection."""
        for line in self._lines:
            line.abort()

    def abort_readers(self, transfers: Set[bytes]) -> None:
        """End those that are sending from the memory of any of these."""
        for line in self._lines:
            if line.reads in transfers:
                line.abort()

    # What the link's watch asks

    @property
    def in_flight_bytes(self) -> int:
        """Sent and not acknowledged."""
        return sum(line.in_flight_bytes for line in self._lines)

    @property
    def rtt_seconds(self) -> float:
        """The longest that the kernel had seen when it was asked last; 0: it has not been."""
        return max((line.seen.rtt_seconds for line in self._lines if line.seen), default=0.0)

    def is_any_slow(self, now: float) -> bool:
        """Whether bytes still move on one that has lasted: its peer is not out of reach."""
        return any(line.pulse.is_slow(now) for line in self._lines)

    def leaving(self, now: float) -> set[bytes]:
        """The transfers of control frames that the peer is still taking."""
        return {said for line in self._lines if (said := line.leaving(now)) is not None}

    def stalled(self, now: float) -> tuple[list[ConnectionWorker], list[ConnectionWorker]]:
        """Those that stand still while others are answered, and those that a PING is to tell of. To be asked often."""
        pulses = {line: line.look(now) for line in self._lines if line.is_alive}
        verdict = self._stalls.look(pulses, now=now)
        return verdict.stalled, list(pulses) if verdict.wants_pings else []
