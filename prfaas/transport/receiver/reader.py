"""Reader of one connection: frames in, chunks straight into their memory, acknowledgements out."""

import contextlib
import threading
import time
from collections.abc import Iterator

from prfaas.errors import RemoteProtocolError
from prfaas.transport.codec.packing import Packer, read_head
from prfaas.transport.net.connection import FRAME_SECONDS, Connection
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import EndReason
from prfaas.transport.protocol.wire import FrameType, Header, chunk_checksum
from prfaas.transport.receiver.admission import FairQuota
from prfaas.transport.receiver.api import OpenRequest
from prfaas.transport.receiver.dispatcher import InboundDispatcher
from prfaas.transport.receiver.transfers import ChunkOutcome

# An acknowledgement leaves after so many chunks or bytes, even on a busy connection, or so many seconds, even on a slow
# one: the sender's rate estimate is made from acknowledgements.
MAX_CHUNKS_PER_ACK = 16
MAX_BYTES_PER_ACK = 2 << 20
MAX_ACK_SECONDS = 0.05
SCRATCH_BYTES = 64 << 10
MAX_ANSWERED = 64
LARGE_FRAME_BYTES = 64 << 10  # An honest sender's control frames are seldom larger.
MAX_LARGE_FRAMES = 8  # Large control frames in memory, of up to 16 MiB each.
MAX_PACKED_FRAMES = 64  # Packed chunks in memory, 3 MiB each with their unpacked bytes.


class FrameQuota:
    """Frames that may be in memory at once, over all connections. A connection without room waits, as does its peer."""

    def __init__(self) -> None:
        self.large, self.packed = FairQuota(MAX_LARGE_FRAMES), FairQuota(MAX_PACKED_FRAMES)
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def reserve(self, quota: FairQuota, peer: str) -> Iterator[None]:
        """Hold room for one frame during the block.

        Raises:
            RemoteProtocolError: there was no room for as long as a frame may take.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: quota.has_room(peer), FRAME_SECONDS):
                raise RemoteProtocolError("memory", "too many large frames at once; retry later")
            quota.change(peer, 1)
        try:
            yield
        finally:
            with self._changed:
                quota.change(peer, -1)
                self._changed.notify_all()


class Reader:
    """Reads one connection whose peer has proven its name."""

    def __init__(self, dispatcher: InboundDispatcher, connection: Connection, *, peer: str, quota: FrameQuota) -> None:
        self._dispatcher = dispatcher
        self._connection = connection
        self._peer = peer
        self._quota = quota
        self._packer = Packer()
        self._num_chunks = 0  # Of this connection.
        self._num_acknowledged = 0
        self._unacknowledged_bytes = 0
        self._acknowledged_at = 0.0  # Monotonic seconds.
        self._answered: dict[bytes, None] = {}  # Unwanted transfers that this connection has answered.

    def run(self) -> None:
        """Read until the connection is lost, or has served longer than its sender should have used it.

        Raises:
            OSError: the connection is lost.
            RemoteProtocolError: the peer breaks the protocol.
        """
        while not self._connection.is_worn_out:
            pending = self._num_chunks - self._num_acknowledged
            is_much = pending >= MAX_CHUNKS_PER_ACK or self._unacknowledged_bytes >= MAX_BYTES_PER_ACK
            is_late = time.monotonic() - self._acknowledged_at >= MAX_ACK_SECONDS
            if pending and (is_much or is_late or not self._connection.has_input()):
                self._acknowledge()
            self._handle(self._connection.read_header())

    def _acknowledge(self) -> None:
        self._num_acknowledged, self._unacknowledged_bytes = self._num_chunks, 0
        self._acknowledged_at = time.monotonic()
        self._connection.write(Header(FrameType.ACK, 0, offset=self._num_chunks).encode())

    def _handle(self, header: Header) -> None:
        if header.type is FrameType.CHUNK:
            self._chunk(header)
        elif header.type is FrameType.PACKED:
            with self._quota.reserve(self._quota.packed, self._peer):
                self._packed_chunk(header)
        elif header.length <= LARGE_FRAME_BYTES:
            self._control(header)
        else:
            # A large frame may take a minute, and acknowledgements do not wait for it.
            if self._num_acknowledged < self._num_chunks:
                self._acknowledge()
            with self._quota.reserve(self._quota.large, self._peer):
                self._control(header)

    def _control(self, header: Header) -> None:
        payload = self._connection.read_payload(header)
        if header.type is FrameType.PING:
            self._connection.write(Header(FrameType.PONG, 0).encode())
        elif header.type is FrameType.OPEN:
            self._open(header, payload)
        elif header.type is FrameType.END:
            with self._dispatcher.exclusive() as transfers:
                transfers.all_sent(self._peer, header, now=time.monotonic())
        elif header.type is FrameType.ERROR:
            raise RemoteProtocolError("refused", messages.decode_ending(payload).message)
        else:  # CANCEL
            self._cancelled(header.transfer_id, messages.decode_ending(payload, header.type))

    def _open(self, header: Header, payload: bytearray) -> None:
        opened = messages.decode_open(header, payload)
        request = OpenRequest(
            transfer_id=header.transfer_id,
            peer_name=self._peer,
            open_body=opened.body,
            object_bytes=opened.sizes,
            deadline_seconds=opened.deadline_seconds,
        )
        self._dispatcher.open(self._connection, request)

    def _cancelled(self, transfer_id: bytes, ending: EndReason) -> None:
        with self._dispatcher.exclusive() as transfers:
            answer = transfers.cancelled(self._connection, self._peer, transfer_id, ending, now=time.monotonic())
        if answer is not None:
            self._connection.try_write(answer)

    # Chunks

    def _chunk(self, header: Header) -> None:
        views = self._dispatcher.begin_write(self._connection, self._peer, header, wire_bytes=header.length)
        if views is None:
            self._skip(header.length)
            self._answer_unwanted(header.transfer_id)
        elif self._read_into(header, views):
            self._request_retransmission(header)
        self._count(header)

    def _packed_chunk(self, header: Header) -> None:
        """Read a PACKED frame, and unpack it into the memory of its chunk."""
        payload = self._connection.read_payload(header)
        chunk = header.unpacked(read_head(payload).raw_bytes)
        views = self._dispatcher.begin_write(self._connection, self._peer, chunk, wire_bytes=header.length)
        if views is None:
            self._answer_unwanted(header.transfer_id)
        elif self._unpack_into(chunk, views, payload):
            self._request_retransmission(header)
        self._count(header)

    def _count(self, header: Header) -> None:
        self._num_chunks += 1
        self._unacknowledged_bytes += header.length

    def _request_retransmission(self, header: Header) -> None:
        again = Header(FrameType.AGAIN, 0, header.transfer_id, offset=self._num_chunks)
        self._connection.write(again.encode())

    def _read_into(self, header: Header, views: list[memoryview]) -> bool:
        """Read a chunk into its memory. Return whether to retransmit it."""
        outcome: ChunkOutcome = "lost"
        try:
            self._connection.read_into(views)
            checksum = chunk_checksum(header.transfer_id, header.slab, views)
            outcome = "complete" if checksum == header.checksum else "corrupt"
        finally:
            for view in views:
                view.release()
            is_retransmitted = self._dispatcher.end_write(self._connection, header, outcome)
        return is_retransmitted

    def _unpack_into(self, chunk: Header, views: list[memoryview], payload: bytearray) -> bool:
        """Unpack a chunk into its memory if its checksum matches. Return whether to retransmit it."""
        outcome: ChunkOutcome = "corrupt"
        try:
            raw = memoryview(self._packer.unpack(payload))
            if chunk_checksum(chunk.transfer_id, chunk.slab, [raw]) == chunk.checksum:
                outcome = "complete"
                for view in views:
                    view[:], raw = raw[: len(view)], raw[len(view) :]
        except RemoteProtocolError:  # A byte that changed on the way can make the payload unreadable.
            outcome = "corrupt"
        finally:
            for view in views:
                view.release()
            is_retransmitted = self._dispatcher.end_write(self._connection, chunk, outcome)
        return is_retransmitted

    def _skip(self, num_bytes: int) -> None:
        """Read and discard the payload of a chunk."""
        scratch = memoryview(bytearray(min(SCRATCH_BYTES, num_bytes)))
        while num_bytes:
            piece = scratch[:num_bytes]
            self._connection.read_into([piece])
            num_bytes -= len(piece)

    def _answer_unwanted(self, transfer_id: bytes) -> None:
        """Tell the sender of an unwanted chunk what became of its transfer, once per connection."""
        if transfer_id in self._answered:
            return
        with self._dispatcher.exclusive() as transfers:
            answer = transfers.reply_to_unwanted(self._peer, transfer_id)
        if answer is not None:
            self._answered[transfer_id] = None
            if len(self._answered) > MAX_ANSWERED:
                del self._answered[next(iter(self._answered))]
            self._connection.try_write(answer)
