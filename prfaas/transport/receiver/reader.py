"""Reads one connection of the receiving end: frames in, chunks straight into their memory, acknowledgements out."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator

from prfaas.errors import RemoteProtocolError
from prfaas.transport.codec import fp8
from prfaas.transport.codec.packing import Packer, read_head
from prfaas.transport.net.connection import FRAME_SECONDS, Connection
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.wire import HEADER_BYTES, FrameType, Header, chunk_checksum
from prfaas.transport.receiver.admission import FairQuota
from prfaas.transport.receiver.api import OpenRequest
from prfaas.transport.receiver.table import Arrivals, ChunkOutcome
from prfaas.transport.receiver.transfer import say

MAX_CHUNKS_PER_ACK = 16
MAX_BYTES_PER_ACK = 2 << 20  # however busy the connection: the sender reckons with what is acknowledged
MAX_ACK_SECONDS = 0.05  # and however slow: a chunk that has come does not wait for the end of the next
SCRATCH_BYTES = 64 << 10  # where chunks go that nobody keeps
MAX_ANSWERED = 64
LARGE_FRAME_BYTES = 64 << 10  # control frames above this are read a few at a time; an honest sender's are seldom larger
MAX_LARGE_FRAMES = 8  # control frames of up to 16 MiB that are being read, over all connections
MAX_PACKED_FRAMES = 64  # packed chunks that are being read and unpacked, 3 MiB each


class FrameQuota:
    """How many frames may be in memory at once, over all connections. Who finds no room waits, and TCP holds its peer back."""

    def __init__(self) -> None:
        self.large, self.packed = FairQuota(MAX_LARGE_FRAMES), FairQuota(MAX_PACKED_FRAMES)
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def one_of(self, frames: FairQuota, peer: str) -> Iterator[None]:
        """Hold one of these frames.

        Raises:
            RemoteProtocolError: there has been no room for as long as a frame may take.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: frames.has_room(peer), FRAME_SECONDS):
                raise RemoteProtocolError("memory", "too many large frames at once; come again")
            frames.change(peer, 1)
        try:
            yield
        finally:
            with self._changed:
                frames.change(peer, -1)
                self._changed.notify_all()


class Reader:
    """Serves one connection whose peer has proven its name."""

    def __init__(
        self,
        arrivals: Arrivals,
        connection: Connection,
        *,
        peer: str,
        bounds: FrameQuota,
        came: Callable[[int], None] = lambda num_bytes: None,
        takes_lossy: bool = False,
    ) -> None:
        """`came` hears the length of each chunk."""
        self._takes_lossy = takes_lossy
        self._count = came
        self._bounds = bounds
        self._packer = Packer()
        self._arrivals = arrivals
        self._connection = connection
        self._peer = peer
        self._num_chunks = 0  # that came on this connection
        self._num_acknowledged = 0
        self._unacknowledged_bytes = 0
        self._acknowledged_at = 0.0  # monotonic seconds
        self._answered: dict[bytes, None] = {}  # unwanted transfers whose sender was told so on this connection

    def run(self) -> None:
        """Read until the connection is lost, or has served for longer than its sender should have let it.

        Raises:
            OSError: it is.
            RemoteProtocolError: the peer breaks the protocol.
        """
        while not self._connection.is_worn_out:
            pending = self._num_chunks - self._num_acknowledged
            is_much = pending >= MAX_CHUNKS_PER_ACK or self._unacknowledged_bytes >= MAX_BYTES_PER_ACK
            is_late = time.monotonic() - self._acknowledged_at >= MAX_ACK_SECONDS
            if pending and (is_much or is_late or not self._connection.has_input()):
                self._acknowledge()
            self._heard(self._connection.read_header())

    def _acknowledge(self) -> None:
        self._num_acknowledged, self._unacknowledged_bytes = self._num_chunks, 0
        self._acknowledged_at = time.monotonic()
        self._connection.write(Header(FrameType.ACK, 0, offset=self._num_chunks).encode())

    def _heard(self, header: Header) -> None:
        if header.type is FrameType.CHUNK:
            self._chunk(header)
            return
        if header.type in (FrameType.PACKED, FrameType.LOSSY):
            if header.type is FrameType.LOSSY and not self._takes_lossy:
                raise RemoteProtocolError("lossy", "lossy chunks are not taken here")
            with self._bounds.one_of(self._bounds.packed, self._peer):
                self._packed(header) if header.type is FrameType.PACKED else self._lossy(header)
            return
        if header.length <= LARGE_FRAME_BYTES:
            self._control(header)
        else:
            if self._num_acknowledged < self._num_chunks:  # they do not wait for what may take a minute
                self._acknowledge()
            with self._bounds.one_of(self._bounds.large, self._peer):
                self._control(header)

    def _control(self, header: Header) -> None:
        payload = self._connection.read_payload(header)
        if header.type is FrameType.PING:
            self._connection.write(Header(FrameType.PONG, 0).encode())
        elif header.type is FrameType.OPEN:
            self._open(header, payload)
        elif header.type is FrameType.END:
            self._arrivals.all_sent(self._peer, header)
        elif header.type is FrameType.ERROR:
            raise RemoteProtocolError("refused", messages.decode_ending(payload).message)
        else:  # CANCEL
            ending = messages.decode_ending(payload, header.type)
            self._arrivals.cancelled(self._connection, self._peer, header.transfer_id, ending)

    def _open(self, header: Header, payload: bytearray) -> None:
        opened = messages.decode_open(header, payload)
        request = OpenRequest(
            transfer_id=header.transfer_id,
            peer_name=self._peer,
            open_body=opened.body,
            object_bytes=opened.sizes,
            deadline_seconds=opened.deadline_seconds,
        )
        self._arrivals.open(self._connection, request)

    def _chunk(self, header: Header) -> None:
        views = self._arrivals.begin_write(self._connection, self._peer, header, wire_bytes=header.length)
        if views is None:
            self._discard(header)
        elif self._read(header, views):
            self._ask_again(header)
        self._came(header)

    def _came(self, chunk: Header) -> None:
        self._num_chunks += 1
        self._unacknowledged_bytes += chunk.length
        self._count(HEADER_BYTES + chunk.length)

    def _ask_again(self, header: Header) -> None:
        again = Header(FrameType.AGAIN, 0, header.transfer_id, offset=self._num_chunks)
        self._connection.write(again.encode())

    def _packed(self, header: Header) -> None:
        payload = self._connection.read_payload(header)
        self._place(header, read_head(payload).raw_bytes, functools.partial(self._packer.unpack, payload))

    def _lossy(self, header: Header) -> None:
        payload = self._connection.read_payload(header)
        self._place(header, fp8.raw_bytes(payload), functools.partial(fp8.restore, payload))

    def _place(self, header: Header, raw_bytes: int, unpack: Callable[[], bytes | bytearray]) -> None:
        """Put a chunk that travelled shorter than it is into its memory."""
        chunk = header.unpacked(raw_bytes)
        views = self._arrivals.begin_write(self._connection, self._peer, chunk, wire_bytes=header.length)
        if views is None:
            self._answer_unwanted(header.transfer_id)
        elif self._unpack(chunk, views, unpack):
            self._ask_again(header)
        self._came(header)

    def _unpack(self, chunk: Header, views: list[memoryview], unpack: Callable[[], bytes | bytearray]) -> bool:
        """Unpack a chunk into its memory; whether it must come again. What does not match is never written."""
        outcome: ChunkOutcome = "changed"
        try:
            raw = memoryview(unpack())
            if chunk_checksum(chunk.transfer_id, chunk.slab, [raw]) == chunk.checksum:
                outcome = "whole"
                for view in views:
                    view[:], raw = raw[: len(view)], raw[len(view) :]
        except RemoteProtocolError:  # a byte that changed on the way can make it no packing at all
            outcome = "changed"
        finally:
            for view in views:
                view.release()
            comes_again = self._arrivals.end_write(self._connection, chunk, outcome)
        return comes_again

    def _read(self, header: Header, views: list[memoryview]) -> bool:
        """Read a chunk into its memory, or a probe's into none; whether it must come again."""
        outcome: ChunkOutcome = "lost"
        try:
            if views:
                self._connection.read_into(views)
            found = chunk_checksum(header.transfer_id, header.slab, views or self._scrap(header))
            outcome = "whole" if found == header.checksum else "changed"
        finally:
            for view in views:
                view.release()
            comes_again = self._arrivals.end_write(self._connection, header, outcome)
        return comes_again

    def _discard(self, header: Header) -> None:
        for _ in self._scrap(header):
            pass
        self._answer_unwanted(header.transfer_id)

    def _scrap(self, header: Header) -> Iterator[memoryview]:
        """A chunk that is kept nowhere, piece by piece; each is there until the next is read."""
        scratch, left = memoryview(bytearray(min(SCRATCH_BYTES, header.length))), header.length
        while left:
            piece = scratch[:left]
            self._connection.read_into([piece])
            left -= len(piece)
            yield piece

    def _answer_unwanted(self, transfer_id: bytes) -> None:
        if transfer_id not in self._answered:
            answer = self._arrivals.what_became_of(self._peer, transfer_id)
            if answer is not None:
                self._remember(transfer_id)
                say(self._connection, answer)

    def _remember(self, transfer_id: bytes) -> None:
        self._answered[transfer_id] = None
        if len(self._answered) > MAX_ANSWERED:
            del self._answered[next(iter(self._answered))]
