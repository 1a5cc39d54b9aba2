"""Outbox of a link: its outbound transfers, the queue of their ready bytes, and the control frames to send.

No threads and no locks: `Link` holds its lock around every call and delivers the events afterwards.
"""

from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import NamedTuple

from prfaas.errors import LocalProtocolError
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import MAX_CANCELS, EndReason, ObjectSizes, TransferStats
from prfaas.transport.protocol.wire import FrameType, Header
from prfaas.transport.ranges import Slab
from prfaas.transport.sender.api import (
    SendAccepted,
    SendCompleted,
    SendEvent,
    SendFailed,
    SendMemoryFree,
    SendProgress,
    SendRequest,
)
from prfaas.transport.sender.chunker import Chunk, Chunker, max_chunk_bytes
from prfaas.transport.sender.outbound_transfer import MAX_CUTS, OutboundEvent, OutboundTransfer, PeerState, wire_sizes
from prfaas.types import FailureReason

MAX_ENDS = 4096  # END frames that wait for a connection. OPEN is repeated for transfers whose END was dropped.


class _PendingCancel(NamedTuple):
    frame: bytes
    deadline: float  # Time at which the peer gives the transfer up by itself.


class PendingCancels:
    """CANCEL frames until the peer has answered them.

    A CANCEL leaves once, and again if a connection is lost before the answer: the frame may have been lost with it.
    Of more than MAX_CANCELS the oldest are dropped. The peer gives those transfers up at their deadline.
    """

    def __init__(self) -> None:
        self._cancels: dict[bytes, _PendingCancel] = {}
        self._unsent: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return bool(self._cancels)

    @property
    def has_unsent(self) -> bool:
        """Return whether a CANCEL waits for a connection."""
        return bool(self._unsent)

    def put(self, transfer_id: bytes, frame: bytes, *, deadline: float) -> None:
        """Queue a CANCEL."""
        self._cancels[transfer_id] = _PendingCancel(frame, deadline)
        self._unsent[transfer_id] = None
        if len(self._cancels) > MAX_CANCELS:
            self.answered(next(iter(self._cancels)))

    def next_frame(self) -> tuple[bytes, bytes]:
        """Take the oldest unsent CANCEL. Returns its transfer id and frame."""
        transfer_id = next(iter(self._unsent))
        del self._unsent[transfer_id]
        return transfer_id, self._cancels[transfer_id].frame

    def answered(self, transfer_id: bytes) -> None:
        """Forget a CANCEL, since the peer has reported how the transfer ended."""
        self._cancels.pop(transfer_id, None)
        self._unsent.pop(transfer_id, None)

    def connection_lost(self) -> None:
        """Queue every unanswered CANCEL again."""
        self._unsent = dict.fromkeys(self._cancels)

    def expire(self, now: float) -> None:
        """Forget the CANCELs of transfers whose deadline has passed."""
        for transfer_id in [name for name, cancel in self._cancels.items() if now >= cancel.deadline]:
            self.answered(transfer_id)


class Outbox:
    """Outbound transfers of a link, and everything that its connections may send next."""

    def __init__(
        self,
        on_event: Callable[[SendEvent], None],
        *,
        num_connections: int,
        weight_of: Callable[[str], float] = lambda tenant: 1.0,
    ) -> None:
        """Create an empty outbox. Its methods call `on_event` before they return.

        `weight_of` returns the weight of a tenant.
        """
        self._on_event = on_event
        self._chunker = Chunker(num_connections, weight_of=weight_of)
        self._transfers: dict[bytes, OutboundTransfer] = {}
        self._to_open: dict[bytes, OutboundTransfer] = {}
        self._cancels = PendingCancels()
        self._ends: deque[tuple[bytes, bytes]] = deque(maxlen=MAX_ENDS)
        self.acknowledged_bytes = 0

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    @property
    def is_busy(self) -> bool:
        """Return whether there are transfers, or CANCELs that the peer has not answered."""
        return bool(self._transfers or self._cancels)

    @property
    def awaits_peer(self) -> bool:
        """Return whether a transfer can continue only after an answer of the peer."""
        return any(transfer.awaits_peer for transfer in self._transfers.values() if not transfer.has_ended)

    @property
    def queued_bytes(self) -> int:
        """Ready bytes that no connection has taken."""
        return self._chunker.queued_bytes

    def set_num_connections(self, count: int) -> None:
        """Cut the queue finely enough for this number of connections."""
        self._chunker.num_connections = count

    def set_rate(self, bytes_per_second: float) -> None:
        """Choose the chunk size for the rate of one connection; infinity if unknown."""
        self._chunker.max_chunk_bytes = max_chunk_bytes(bytes_per_second)

    # Called for the agent

    def open(self, request: SendRequest, *, now: float) -> None:
        """Offer a transfer to the peer. A transfer that the wire cannot carry fails at once.

        Raises:
            LocalProtocolError: a transfer of this id is open.
        """
        if request.transfer_id in self._transfers:
            raise LocalProtocolError(f"transfer {request.transfer_id.hex()} is open already")
        sizes, objection = wire_sizes(request)
        transfer = OutboundTransfer(request, sizes, now)
        self._transfers[transfer.id] = self._to_open[transfer.id] = transfer
        self._chunker.add(transfer.id, priority=request.priority, tenant=request.tenant)
        if objection:
            self._end(transfer, SendFailed(transfer.id, "protocol", objection), now)

    def ready(self, transfer_id: bytes, slab: Slab, *, now: float) -> bool:
        """Mark bytes as ready to leave. Returns whether connections may have new work.

        Raises:
            LocalProtocolError: the transfer has no such bytes.
        """
        transfer = self._live(transfer_id)
        if transfer is None:
            return False
        if not transfer.sizes.holds(slab):
            raise LocalProtocolError(f"no object of transfer {transfer_id.hex()} has {slab}")
        fresh = transfer.make_ready(slab)
        if transfer.is_sending:
            self._queue(transfer, fresh, now=now)
        return transfer.is_sending

    def _live(self, transfer_id: bytes) -> OutboundTransfer | None:
        transfer = self._transfers.get(transfer_id)
        return None if transfer is None or transfer.has_ended else transfer

    def _queue(self, transfer: OutboundTransfer, slabs: list[Slab], *, now: float) -> None:
        """Queue the parts that the peer lacks. Cancels a transfer whose ranges would become too fragmented."""
        if not transfer.count_cuts(slabs):
            text = f"objects that the peer holds cut the missing ones into more than {MAX_CUTS} pieces"
            self.cancel(transfer.id, EndReason("protocol", text), now=now)
            return
        for slab in slabs:
            for part in transfer.parts_to_send(slab):
                self._chunker.ready(transfer.id, part)

    def cancel(self, transfer_id: bytes, ending: EndReason, *, now: float) -> None:
        """End a transfer and tell the peer."""
        transfer = self._live(transfer_id)
        if transfer is not None:
            self.decline(transfer_id, ending, deadline=transfer.deadline)
            self._end(transfer, SendFailed(transfer_id, ending.reason, ending.message), now)

    def decline(self, transfer_id: bytes, ending: EndReason, *, deadline: float) -> None:
        """Tell the peer that a transfer, which it may await until `deadline`, will not be opened."""
        self._cancels.put(transfer_id, messages.encode_ending(FrameType.CANCEL, transfer_id, ending), deadline=deadline)

    def fail_all(self, reason: FailureReason, message: str, *, now: float) -> None:
        """End every transfer without telling the peer."""
        for transfer in list(self._transfers.values()):
            if not transfer.has_ended:
                self._end(transfer, SendFailed(transfer.id, reason, message), now)

    def late(self, *, now: float, unreachable_before: float) -> list[tuple[bytes, FailureReason]]:
        """Return the transfers whose time is up, and why. See `OutboundTransfer.lateness`."""
        self._cancels.expire(now)
        transfers = self._transfers.values()
        reasons = {transfer.id: transfer.lateness(now, unreachable_before=unreachable_before) for transfer in transfers}
        return [(transfer_id, reason) for transfer_id, reason in reasons.items() if reason is not None]

    def stuck(self, *, ended_before: float) -> set[bytes]:
        """Return the transfers that ended before this time, but whose memory a connection still reads."""
        return {
            transfer.id
            for transfer in self._transfers.values()
            if transfer.ended_at is not None and transfer.ended_at < ended_before
        }

    # Called for the connections

    def has_work(self) -> bool:
        """Return whether a connection has anything to send."""
        return bool(self._cancels.has_unsent or self._ends or self._to_open) or self._chunker.has_work()

    def next_frame(self, *, now: float) -> tuple[bytes, bytes] | None:
        """Take the next control frame, if any. Returns its transfer id and the frame. Control frames precede chunks."""
        if self._cancels.has_unsent:
            return self._cancels.next_frame()
        if self._ends:
            return self._ends.popleft()
        if self._to_open:
            transfer = self._to_open.pop(next(iter(self._to_open)))
            return transfer.id, transfer.open_frame(now)
        return None

    def take(self) -> tuple[Chunk, SendRequest] | None:
        """Take the next chunk, if any. The connection reads the transfer's memory until it calls `sent`."""
        chunk = self._chunker.take()
        if chunk is None:
            return None
        transfer = self._transfers[chunk.transfer_id]
        transfer.num_readers += 1
        return chunk, transfer.request

    def sent(self, chunk: Chunk) -> bool:
        """Note that a connection has finished reading a chunk's memory. Returns whether END is ready to leave."""
        transfer = self._transfers[chunk.transfer_id]
        transfer.num_readers -= 1
        if transfer.has_ended:
            self._free_unread(transfer)
            return False
        return self._queue_end(transfer)

    def _queue_end(self, transfer: OutboundTransfer) -> bool:
        is_all_sent = transfer.is_sending and not transfer.unready_bytes and self._chunker.is_drained(transfer.id)
        if not is_all_sent or transfer.has_queued_end:
            return False
        transfer.has_queued_end = True
        end = Header(FrameType.END, 0, transfer.id, offset=transfer.missing_bytes).encode()
        self._ends.append((transfer.id, end))
        return True

    # Called for frames of the peer

    def sizes_awaiting_have(self, transfer_id: bytes) -> ObjectSizes | None:
        """Return the object sizes of a transfer that awaits its HAVE, or None."""
        transfer = self._live(transfer_id)
        return None if transfer is None or transfer.is_sending else transfer.sizes

    def have(self, transfer_id: bytes, peer_state: PeerState, *, now: float) -> None:
        """Start sending a transfer that a process of the peer has accepted."""
        transfer = self._live(transfer_id)
        if transfer is None or transfer.is_sending:
            return
        transfer.accept(peer_state)
        if not transfer.was_accepted:
            transfer.was_accepted = True
            self._on_event(SendAccepted(transfer_id, transfer.missing_bytes, peer_state.held.copy()))
        self._queue(transfer, list(transfer.ready.slabs()), now=now)

    def landed(self, chunks: Iterable[Chunk], *, time_ns: int) -> None:
        """Count chunks that have arrived intact."""
        grown: dict[bytes, OutboundTransfer] = {}
        for chunk in chunks:
            transfer = self._live(chunk.transfer_id)
            if transfer is not None:
                self.acknowledged_bytes += transfer.acked.add(chunk.slab)
                grown[transfer.id] = transfer
        for transfer in grown.values():
            self._on_event(SendProgress(transfer.id, transfer.acked.num_bytes, time_ns))

    def put_back(self, chunks: list[Chunk]) -> None:
        """Queue chunks again that were taken, oldest first, and did not arrive."""
        for chunk in reversed(chunks):
            transfer = self._live(chunk.transfer_id)
            if transfer is not None and transfer.is_sending:
                self._chunker.put_back(chunk)

    def done(self, transfer_id: bytes, stats: TransferStats, *, now: float) -> None:
        """Complete a transfer. Its last acknowledgements may come later."""
        self._cancels.answered(transfer_id)
        transfer = self._live(transfer_id)
        if transfer is not None:
            self.acknowledged_bytes += transfer.missing_bytes - transfer.acked.num_bytes
            self._end(transfer, SendCompleted(transfer_id, stats), now)

    def refused(self, transfer_id: bytes, ending: EndReason, *, now: float) -> None:
        """Fail a transfer that the peer rejects or gives up. Also the answer to a CANCEL."""
        self._cancels.answered(transfer_id)
        transfer = self._live(transfer_id)
        if transfer is not None:
            self._end(transfer, SendFailed(transfer_id, ending.reason, ending.message), now)

    def reopen(self, transfer_id: bytes) -> None:
        """Open a transfer again that the peer does not know."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.is_sending:
            self._reopen(transfer)

    def connection_lost(self, *, is_last: bool) -> None:
        """Open the transfers again whose answer may be lost. After the last connection that is all of them."""
        self._cancels.connection_lost()
        for transfer in self._transfers.values():
            if not transfer.has_ended and (is_last or transfer.awaits_answer):
                self._reopen(transfer)

    def repeat_unanswered(self, *, now: float, patience_seconds: float, leaving: Set[bytes]) -> bool:
        """Repeat the OPEN of transfers that have waited too long for an answer. Returns whether there are any.

        The answer may have been lost with its connection, or damaged chunks may be missing: HAVE and DONE tell.
        `leaving` are the transfers whose last control frame has not left completely. Their wait has not begun.
        """
        is_any = False
        for transfer in self._transfers.values():
            has_left = transfer.id not in self._to_open and transfer.id not in leaving
            if transfer.repeats_open(now, has_left=has_left, patience_seconds=patience_seconds):
                self._reopen(transfer)
                is_any = True
        return is_any

    def _reopen(self, transfer: OutboundTransfer) -> None:
        transfer.reopen()
        self._to_open[transfer.id] = transfer
        # HAVE will name the bytes that still have to travel.
        self._chunker.clear(transfer.id)

    # Endings

    def _end(self, transfer: OutboundTransfer, event: SendCompleted | SendFailed, now: float) -> None:
        is_completed = isinstance(event, SendCompleted)
        transfer.advance(OutboundEvent.COMPLETE if is_completed else OutboundEvent.FAIL)
        transfer.ended_at = now
        self._chunker.remove(transfer.id)
        self._to_open.pop(transfer.id, None)
        self._on_event(event)
        self._free_unread(transfer)

    def _free_unread(self, transfer: OutboundTransfer) -> None:
        if transfer.num_readers == 0:
            transfer.advance(OutboundEvent.RELEASE)
            del self._transfers[transfer.id]
            self._on_event(SendMemoryFree(transfer.id))
