"""The transfers that leave over one link and the bytes of theirs that may: what its connections take from.

No threads and no locks of its own: `sender.Link` holds its lock around every call, and tells the events afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import replace

from prfaas.errors import LocalProtocolError
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import Done, Ending, ObjectSizes
from prfaas.transport.protocol.wire import FrameType, Header
from prfaas.transport.ranges import Slab
from prfaas.transport.receiver.api import TransferStats
from prfaas.transport.sender.api import (
    SendAccepted,
    SendCompleted,
    SendEvent,
    SendFailed,
    SendMemoryFree,
    SendProgress,
    SendRequest,
)
from prfaas.transport.sender.chunker import Chunk, Chunker, ChunkSize, chunk_size
from prfaas.transport.sender.outbound_transfer import MAX_CUTS, OutboundTransfer, PeerState, PendingCancels, sizes_of
from prfaas.types import FailureReason

MAX_ENDS = 4096  # waiting for a connection; the oldest are dropped, whose transfers ask again


class Outbox:
    """Transfers by id, the queue of their ready bytes, and the control frames that any connection may carry."""

    def __init__(self, on_event: Callable[[SendEvent], None], *, num_connections: int) -> None:
        """`on_event` is called within the calls below."""
        self._on_event = on_event
        self._chunker = Chunker(num_connections)
        self._sendings: dict[bytes, OutboundTransfer] = {}
        self._to_open: dict[bytes, OutboundTransfer] = {}  # in order
        self._cancels = PendingCancels()
        self._ends: deque[tuple[bytes, bytes]] = deque(maxlen=MAX_ENDS)
        self.acknowledged_bytes = 0

    @property
    def num_transfers(self) -> int:
        return len(self._sendings)

    @property
    def is_busy(self) -> bool:
        """Whether there are transfers, or CANCELs that the peer has not answered."""
        return bool(self._sendings) or self._cancels.is_any

    @property
    def is_owed(self) -> bool:
        """Whether something depends on the peer."""
        return any(sending.is_owed for sending in self._sendings.values() if not sending.has_ended)

    @property
    def queued_bytes(self) -> int:
        """Ready, and not yet handed to a connection."""
        return self._chunker.queued_bytes

    def set_num_connections(self, count: int) -> None:
        """The queue is cut finely enough for so many."""
        self._chunker.num_connections = count

    def set_rate(self, bytes_per_second: float) -> ChunkSize:
        """What each connection carries; infinity while that is not known. Returns how large chunks are for it."""
        self._chunker.size = chunk_size(bytes_per_second=bytes_per_second)
        return self._chunker.size

    # What the agent says

    def open(self, transfer: SendRequest, *, now: float) -> None:
        """Offer a transfer to the peer; one that the wire cannot carry fails with its reason.

        Raises:
            LocalProtocolError: it is open already.
        """
        if transfer.transfer_id in self._sendings:
            raise LocalProtocolError(f"transfer {transfer.transfer_id.hex()} is open already")
        sizes, objection = sizes_of(transfer)
        sending = OutboundTransfer(transfer, sizes, now)
        self._sendings[sending.id] = self._to_open[sending.id] = sending
        self._chunker.add(sending.id, priority=transfer.priority)
        if objection:
            self._end(sending, SendFailed(sending.id, "protocol", objection), now)

    def ready(self, transfer_id: bytes, slab: Slab, *, now: float) -> bool:
        """These bytes may leave now; returns whether that gave a connection something to do.

        Raises:
            LocalProtocolError: the transfer has no such bytes.
        """
        sending = self._live(transfer_id)
        if sending is None:
            return False
        if not sending.sizes.holds(slab):
            raise LocalProtocolError(f"no object of transfer {transfer_id.hex()} has {slab}")
        fresh = sending.make_ready(slab)
        if sending.is_accepted:
            self._queue(sending, fresh, now=now)
        return sending.is_accepted

    def prioritise(self, transfer_id: bytes, priority: int) -> None:
        """A transfer has become more or less urgent."""
        sending = self._live(transfer_id)
        if sending is not None and priority != sending.transfer.priority:
            sending.transfer = replace(sending.transfer, priority=priority)
            self._chunker.prioritise(transfer_id, priority)

    def _live(self, transfer_id: bytes) -> OutboundTransfer | None:
        sending = self._sendings.get(transfer_id)
        return None if sending is None or sending.has_ended else sending

    def _queue(self, sending: OutboundTransfer, slabs: list[Slab], *, now: float) -> None:
        """Have the parts of these that the peer lacks leave; a transfer that this would cut too finely ends."""
        if not sending.cut(slabs):
            text = f"what the peer holds would cut what it lacks into more than {MAX_CUTS} pieces"
            self.cancel(sending.id, Ending("protocol", text), now=now)
            return
        for slab in slabs:
            for part in sending.take_up(slab):
                self._chunker.ready(sending.id, part)

    def cancel(self, transfer_id: bytes, ending: Ending, *, now: float) -> None:
        """End a transfer; the peer hears of it."""
        sending = self._live(transfer_id)
        if sending is not None:
            self.decline(transfer_id, ending, deadline=sending.deadline)
            self._end(sending, SendFailed(transfer_id, ending.reason, ending.message), now)

    def decline(self, transfer_id: bytes, ending: Ending, *, deadline: float) -> None:
        """Have the peer hear that a transfer will not be opened, which it may await until `deadline`."""
        self._cancels.put(transfer_id, messages.encode_ending(FrameType.CANCEL, transfer_id, ending), deadline=deadline)

    def fail_all(self, reason: FailureReason, message: str, *, now: float) -> None:
        """End every transfer; nobody hears of it but their owners."""
        for sending in list(self._sendings.values()):
            self._end(sending, SendFailed(sending.id, reason, message), now)

    def late(self, *, now: float, unreachable_before: float) -> list[tuple[bytes, FailureReason]]:
        """Transfers whose time is up, and why; the peer has been out of reach for too long for those opened before."""
        self._cancels.expire(now)
        sendings = self._sendings.values()
        reasons = {sending.id: sending.lateness(now, unreachable_before=unreachable_before) for sending in sendings}
        return [(transfer_id, reason) for transfer_id, reason in reasons.items() if reason is not None]

    def stuck(self, *, ended_before: float) -> set[bytes]:
        """Transfers that ended before then and whose memory a connection still reads."""
        return {
            sending.id
            for sending in self._sendings.values()
            if sending.ended_at is not None and sending.ended_at < ended_before
        }

    # What the connections take

    def has_work(self) -> bool:
        """Whether something waits for a connection."""
        return bool(self._cancels.unsaid or self._ends or self._to_open) or self._chunker.has_work()

    def next_frame(self, *, now: float) -> tuple[bytes, bytes] | None:
        """A control frame that waits for a connection, after its transfer; they go before bytes."""
        if self._cancels.unsaid:
            return self._cancels.next_frame()
        if self._ends:
            return self._ends.popleft()
        if self._to_open:
            sending = self._to_open.pop(next(iter(self._to_open)))
            return sending.id, sending.open_frame(now)
        return None

    def take(self) -> tuple[Chunk, SendRequest] | None:
        """The next bytes to send, and of what; their memory is in use until `sent`."""
        chunk = self._chunker.take()
        if chunk is None:
            return None
        sending = self._sendings[chunk.transfer_id]
        sending.num_users += 1
        return chunk, sending.transfer

    def sent(self, chunk: Chunk) -> bool:
        """A connection has read the chunk's memory for the last time; returns whether a frame is there to send."""
        sending = self._sendings[chunk.transfer_id]
        sending.num_users -= 1
        if sending.has_ended:
            self._free(sending)
            return False
        return self._say_end(sending)

    def _say_end(self, sending: OutboundTransfer) -> bool:
        is_all = sending.is_accepted and not sending.unready_bytes and self._chunker.is_drained(sending.id)
        if not is_all or sending.said_end:
            return False
        sending.said_end = True
        self._ends.append((sending.id, Header(FrameType.END, 0, sending.id, offset=sending.missing_bytes).encode()))
        return True

    # What the peer says

    def sizes_of(self, transfer_id: bytes) -> ObjectSizes | None:
        """The objects of a transfer whose HAVE is awaited; None: there is no such transfer."""
        sending = self._live(transfer_id)
        return None if sending is None or sending.is_accepted else sending.sizes

    def have(self, transfer_id: bytes, standing: PeerState, *, process: bytes, now: float) -> None:
        """This process of the peer has accepted a transfer and says what it holds; all else that is ready may leave."""
        sending = self._live(transfer_id)
        if sending is None or sending.is_accepted:
            return
        sending.accepted(standing)
        if not sending.was_accepted:
            sending.was_accepted = True
            self._on_event(SendAccepted(transfer_id, sending.missing_bytes, standing.held.copy(), process))
        self._queue(sending, list(sending.ready.slabs()), now=now)

    def landed(self, chunks: Iterable[Chunk], *, time_ns: int) -> None:
        """Chunks have arrived whole."""
        grown: dict[bytes, OutboundTransfer] = {}
        for chunk in chunks:
            sending = self._live(chunk.transfer_id)
            if sending is not None:
                self.acknowledged_bytes += sending.acked.add(chunk.slab)
                grown[sending.id] = sending
        for sending in grown.values():
            self._on_event(SendProgress(sending.id, sending.acked.num_bytes, time_ns))

    def put_back(self, chunks: list[Chunk]) -> None:
        """Chunks that were taken, oldest first, and did not arrive leave again."""
        for chunk in reversed(chunks):
            sending = self._live(chunk.transfer_id)
            if sending is not None and sending.is_accepted:
                self._chunker.put_back(chunk)

    def done(self, transfer_id: bytes, done: Done, *, now: float) -> None:
        """The peer has every byte. The last acknowledgements may come after this."""
        self._cancels.answered(transfer_id)
        sending = self._live(transfer_id)
        if sending is not None:
            self.acknowledged_bytes += sending.missing_bytes - sending.acked.num_bytes
            stats = TransferStats(done.wire_bytes, done.checksum_failures)
            self._end(sending, SendCompleted(transfer_id, stats), now)

    def refused(self, transfer_id: bytes, ending: Ending, *, now: float) -> None:
        """The peer gives a transfer up, as this side may have before, or does not take it."""
        self._cancels.answered(transfer_id)
        sending = self._live(transfer_id)
        if sending is not None:
            self._end(sending, SendFailed(transfer_id, ending.reason, ending.message), now)

    def reopen(self, transfer_id: bytes) -> None:
        """The peer does not know a transfer that it was sent chunks of."""
        sending = self._sendings.get(transfer_id)
        if sending is not None and sending.is_accepted:
            self._open_again(sending)

    def connection_lost(self, *, is_last: bool) -> None:
        """Whoever waits for an answer asks again, and after the last connection everybody."""
        self._cancels.connection_lost()
        for sending in self._sendings.values():
            if is_last or sending.awaits_answer:
                self._open_again(sending)

    def ask_again(self, *, now: float, patience_seconds: float, leaving: Set[bytes]) -> bool:
        """Repeat the OPEN of whoever waits for an answer for so long, twice as long each time; returns whether any does.

        The answer may be lost with its connection, or say what chunks that came damaged have undone: HAVE and DONE tell.
        Nobody waits yet for the answer to a frame that is still leaving: `leaving` are the transfers of those.
        """
        is_any = False
        for sending in self._sendings.values():
            is_said = sending.id not in self._to_open and sending.id not in leaving
            if sending.is_to_repeat(now, is_said=is_said, patience_seconds=patience_seconds):
                self._open_again(sending)
                is_any = True
        return is_any

    def _open_again(self, sending: OutboundTransfer) -> None:
        sending.is_accepted = False
        if not sending.has_ended:
            sending.tell_whole()
            self._to_open[sending.id] = sending
        self._chunker.clear(sending.id)  # HAVE tells what is still to be sent

    # Ending

    def _end(self, sending: OutboundTransfer, event: SendCompleted | SendFailed, now: float) -> None:
        if sending.has_ended:
            return
        sending.ended_at = now
        self._chunker.remove(sending.id)
        self._to_open.pop(sending.id, None)
        self._on_event(event)
        self._free(sending)

    def _free(self, sending: OutboundTransfer) -> None:
        if sending.num_users == 0 and self._sendings.pop(sending.id, None) is not None:
            self._on_event(SendMemoryFree(sending.id))
