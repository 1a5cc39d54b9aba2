"""Inbound transfers: who may write where, what has arrived, and how each transfer ends. Pure.

Callers pass the time and one hashable key per connection. They carry out the queued `events` and `replies`.

A chunk whose bytes have all arrived is not written again, and two connections never write to the same bytes.
The memory of a transfer is free once the transfer has ended and no connection writes to it.

A sender counts as unreachable when every connection that carried part of the transfer is lost and it does not open the
transfer again in time. REOPEN asks for that over other connections of the peer, because a sender that lost a few
connections still has others, and a restarted one knows nothing of the transfer.
"""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Literal, TypeVar

from prfaas.errors import RemoteProtocolError
from prfaas.state_machine import TransitionTable
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import MAX_SLABS, EndReason, Have, TransferStats
from prfaas.transport.protocol.wire import HEADER_BYTES, FrameType, Header
from prfaas.transport.ranges import Area, Slab
from prfaas.transport.receiver.admission import MAX_TOTAL_FRAGMENTS, Admission, EndedTransfers, FragmentQuota
from prfaas.transport.receiver.api import (
    Acceptance,
    OpenRequest,
    ReceiveCompleted,
    ReceiveEvent,
    ReceiveFailed,
    ReceiveMemoryFree,
    ReceiveProgress,
    Rejection,
)
from prfaas.transport.receiver.assembler import MAX_ATTEMPTS_PER_CHUNK, MAX_CORRUPT_CHUNKS, Assembler
from prfaas.types import FailureReason

MAX_ENDED = 4096  # Remembered outcomes, about 400 bytes each.
MAX_ENDED_MESSAGE_BYTES = 100
STUCK_WRITE_SECONDS = 1.0  # Time for a chunk of an ended transfer to finish.
REOPEN_RATIO = 0.25  # REOPEN is sent after each such part of `silence_seconds` without a connection.
REOPEN_CONNECTIONS = 4
HAVE_SECONDS = 0.1  # Shortest time between two HAVEs of a transfer, as one may take 10 ms to make.

C = TypeVar("C", bound=Hashable)
ChunkOutcome = Literal["complete", "corrupt", "lost"]


class InboundState(Enum):
    """State of one inbound transfer."""

    DECIDING = "the caller decides"
    RECEIVING = "chunks are written"
    ABANDONED = "ended before the caller decided"
    CLOSING = "ended, and chunks may still be written"
    RELEASED = "memory is free"


class InboundEvent(Enum):
    """Event that moves an inbound transfer to another state."""

    ACCEPT = "the caller grants memory"
    REJECT = "the caller refuses"
    COMPLETE = "the last byte has arrived"
    FAIL = "cancelled, late, unreachable, or corrupt"
    RELEASE = "the last writer has left"


TRANSITIONS = TransitionTable(
    "inbound transfer",
    InboundState.DECIDING,
    {
        (InboundState.DECIDING, InboundEvent.ACCEPT): InboundState.RECEIVING,
        (InboundState.DECIDING, InboundEvent.REJECT): InboundState.RELEASED,
        (InboundState.DECIDING, InboundEvent.FAIL): InboundState.ABANDONED,
        (InboundState.ABANDONED, InboundEvent.ACCEPT): InboundState.CLOSING,
        (InboundState.ABANDONED, InboundEvent.REJECT): InboundState.RELEASED,
        (InboundState.RECEIVING, InboundEvent.COMPLETE): InboundState.CLOSING,
        (InboundState.RECEIVING, InboundEvent.FAIL): InboundState.CLOSING,
        (InboundState.CLOSING, InboundEvent.RELEASE): InboundState.RELEASED,
    },
)


@dataclass(frozen=True)
class Reply(Generic[C]):
    """Frame for the sender of a transfer.

    DONE or ERROR is sent on every connection, because any of them may be dead already. Without a frame the reply is
    the transfer's HAVE, made when it is sent. A delayed reply waits for the next tick.
    """

    transfer_id: bytes
    frame: bytes | None = None
    connections: tuple[C, ...] = ()
    is_delayed: bool = False


@dataclass
class Upkeep(Generic[C]):
    """Work that `InboundTransfers.tick` leaves to the caller."""

    aborts: list[C] = field(default_factory=list)
    reopens: list[tuple[C, bytes]] = field(default_factory=list)


@dataclass(eq=False)
class InboundTransfer(Generic[C]):
    """One transfer at its receiver. Times are monotonic seconds."""

    request: OpenRequest
    deadline: float
    fragments: FragmentQuota
    # Connections that carried any part of it. The last entry opened or joined the transfer last.
    connections: dict[C, None]
    state: InboundState = TRANSITIONS.initial
    accepted: Acceptance | None = None
    assembler: Assembler | None = None
    writers: dict[C, Slab] = field(default_factory=dict)
    wire_bytes: int = 0
    # Arrival of the first and of the latest chunk.
    first_at: float | None = None
    latest_at: float | None = None
    have_queued_at: float = 0.0
    disconnected_at: float | None = None
    num_reopens: int = 0
    ended_at: float | None = None

    def advance(self, event: InboundEvent) -> None:
        """Move to the next state."""
        self.state = TRANSITIONS.next(self.state, event)

    @property
    def is_active(self) -> bool:
        """Return whether the transfer has not ended."""
        return self.state is InboundState.RECEIVING or self.state is InboundState.DECIDING

    @property
    def stats(self) -> TransferStats:
        return TransferStats(self.wire_bytes, self.assembler.num_corrupt if self.assembler else 0)

    @property
    def latest_first(self) -> list[C]:
        """Connections in the order in which a reply tries them."""
        return list(reversed(self.connections))

    def progress(self) -> ReceiveProgress | None:
        """Return what has arrived; None after the end or before the decision."""
        if self.state is not InboundState.RECEIVING or self.assembler is None:
            return None
        return ReceiveProgress(self.assembler.total_bytes, self.assembler.missing_bytes, self.first_at, self.latest_at)

    def have(self) -> Have | None:
        """Return what has arrived, as far as one HAVE can list it; None after the end or before the decision."""
        if self.state is not InboundState.RECEIVING or self.assembler is None:
            return None
        return Have(self.assembler.held, tuple(itertools.islice(self.assembler.arrived.slabs(), MAX_SLABS)))

    def opened_over(self, connection: C) -> None:
        """Note a connection over which the sender has opened the transfer."""
        self.connections.pop(connection, None)
        self.carried_by(connection)

    def carried_by(self, connection: C) -> None:
        """Note a connection that carries part of the transfer."""
        self.connections[connection] = None
        self.disconnected_at = None

    def connection_lost(self, connection: C, *, now: float) -> None:
        if connection in self.connections:
            del self.connections[connection]
            if not self.connections:
                self.disconnected_at, self.num_reopens = now, 0

    def overdue_reason(self, now: float, *, silence_seconds: float, heard_at: float) -> FailureReason | None:
        """Return why the transfer must fail now, if its deadline has passed or its sender is unreachable.

        `heard_at` is the time of the sender's latest sign of life.
        """
        if not self.is_active:
            return None
        if now >= self.deadline:
            return "deadline"
        gone_at = heard_at if self.disconnected_at is None else self.disconnected_at
        return "unreachable" if now - gone_at >= silence_seconds else None

    def needs_reopen(self, now: float, *, interval_seconds: float) -> bool:
        """Return whether another interval has passed without a connection."""
        since = self.disconnected_at
        return since is not None and self.is_active and now - since >= (self.num_reopens + 1) * interval_seconds

    def rivals(self, slab: Slab) -> list[C]:
        """Return the connections that write to any byte of a chunk."""
        return [connection for connection, written in self.writers.items() if written.overlaps(slab)]

    def begin_write(self, connection: C, slab: Slab) -> bool:
        """Note that a connection writes a chunk, unless the chunk is not wanted any more."""
        if self.state is not InboundState.RECEIVING or self.assembler is None or not self.assembler.wants(slab):
            return False
        self.writers[connection] = slab
        return True


class InboundTransfers(Generic[C]):
    """Every inbound transfer of one receiver, from any peer. The caller holds a lock around every call."""

    def __init__(self, *, silence_seconds: float, max_fragments: int = MAX_TOTAL_FRAGMENTS) -> None:
        self.events: list[ReceiveEvent] = []
        self.replies: list[Reply[C]] = []
        self._silence_seconds = silence_seconds
        self._transfers: dict[bytes, InboundTransfer[C]] = {}
        # Connections of each peer, and whether the peer sends heartbeats.
        self._peer_connections: dict[str, dict[C, bool]] = defaultdict(dict)
        self._admission = Admission(max_fragments=max_fragments)
        self._ended: EndedTransfers[bytes] = EndedTransfers(MAX_ENDED)

    def get(self, transfer_id: bytes) -> InboundTransfer[C] | None:
        return self._transfers.get(transfer_id)

    # Opening

    def refusal(self, request: OpenRequest) -> bytes | None:
        """Return the frame that answers a rejected OPEN: the earlier outcome, or an ERROR."""
        transfer_id, peer = request.transfer_id, request.peer_name
        outcome = self._ended.get(peer, transfer_id)
        if outcome is not None:
            return outcome
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            if transfer.request.peer_name == peer and transfer.is_active:
                return None
            return error_frame(transfer_id, "protocol", "the transfer belongs to another peer, or is closing")
        objection = self._admission.objection(request)
        return error_frame(transfer_id, "no_memory", objection) if objection else None

    def open(self, connection: C, request: OpenRequest, *, now: float) -> InboundTransfer[C] | None:
        """Take an OPEN without a refusal. Return the transfer if it is new, for the caller to decide."""
        transfer = self._transfers.get(request.transfer_id)
        if transfer is None:
            quota = self._admission.admit(request)
            transfer = InboundTransfer(request, now + request.deadline_seconds, quota, {connection: None})
            self._transfers[request.transfer_id] = transfer
            return transfer
        transfer.opened_over(connection)
        if transfer.state is InboundState.RECEIVING:
            is_delayed = now - transfer.have_queued_at < HAVE_SECONDS
            self.replies.append(Reply(request.transfer_id, is_delayed=is_delayed))
            transfer.have_queued_at = transfer.have_queued_at if is_delayed else now
        return None

    def accept(self, transfer: InboundTransfer[C], decision: Acceptance, assembler: Assembler, *, now: float) -> None:
        """Take the caller's decision to receive a transfer, which may have ended meanwhile."""
        transfer.advance(InboundEvent.ACCEPT)
        transfer.accepted, transfer.assembler = decision, assembler
        if not transfer.is_active:
            self._release(transfer)
        elif assembler.missing_bytes:
            self.replies.append(Reply(transfer.request.transfer_id))
        else:
            # DONE would replace a queued HAVE, without which the sender does not know that nothing had to travel.
            have = messages.encode_have(transfer.request.transfer_id, Have(assembler.held, ()))
            self._complete(transfer, now, before_done=have)

    def reject(self, transfer: InboundTransfer[C], decision: Rejection) -> None:
        """Take the caller's decision not to receive a transfer, which may have ended meanwhile."""
        was_active = transfer.is_active
        transfer.advance(InboundEvent.REJECT)
        self._remove(transfer)
        if was_active:
            ending = EndReason(decision.reason, decision.message)
            self._reply_last(transfer, messages.encode_ending(FrameType.ERROR, transfer.request.transfer_id, ending))

    # Chunks

    def on_chunk_header(
        self, connection: C, peer: str, header: Header, *, wire_bytes: int
    ) -> InboundTransfer[C] | None:
        """Count a chunk that begins to arrive. Return its transfer if the chunk is to be read into memory.

        `begin_write` of the transfer must follow, once no rival writes to the same bytes. `wire_bytes` excludes
        the header.

        Raises:
            RemoteProtocolError: the peer may not send this chunk.
        """
        transfer = self._transfers.get(header.transfer_id)
        if transfer is None or transfer.state is not InboundState.RECEIVING or transfer.assembler is None:
            return None
        if transfer.request.peer_name != peer:
            raise RemoteProtocolError("owner", "a chunk of another peer's transfer")
        transfer.carried_by(connection)
        transfer.wire_bytes += HEADER_BYTES + wire_bytes
        slab = header.slab
        if not transfer.assembler.wants(slab):
            return None
        transfer.fragments.check(transfer.assembler.arrived, slab)
        return transfer

    def end_write(self, connection: C, header: Header, outcome: ChunkOutcome, *, now: float) -> bool:
        """Take the outcome of a chunk. Return whether the sender must retransmit it."""
        transfer = self._transfers[header.transfer_id]
        assembler = transfer.assembler
        assert assembler is not None
        slab = transfer.writers.pop(connection)
        is_retransmitted = False
        # Other chunks may have begun while there was room for each of them alone.
        if not transfer.fragments.has_room(assembler.arrived, slab):
            assembler.arrived = Area()
        if not transfer.is_active:
            self._release(transfer)
        elif outcome == "complete":
            assembler.arrived.add(slab)
            transfer.first_at, transfer.latest_at = transfer.first_at or now, now
            if not assembler.missing_bytes:
                self._complete(transfer, now)
        elif outcome == "lost":
            # It was written in part, maybe over earlier bytes.
            assembler.arrived.remove(slab)
        else:
            is_retransmitted = assembler.reject(slab)
            if not is_retransmitted:
                limits = f"{MAX_ATTEMPTS_PER_CHUNK} times, or {MAX_CORRUPT_CHUNKS} chunks did"
                self._fail(transfer, "checksum", f"{slab} arrived corrupt {limits}", now=now)
        transfer.fragments.update(assembler.arrived)
        return is_retransmitted

    def reply_to_unwanted(self, peer: str, transfer_id: bytes) -> bytes | None:
        """Return the frame that answers a chunk of a transfer that is not open; None if it is open."""
        if transfer_id in self._transfers:
            return None
        return self._ended.get(peer, transfer_id) or reopen_frame(transfer_id)

    def all_sent(self, peer: str, header: Header, *, now: float) -> None:
        """Take an END: fail the transfer if the sender's count of bytes differs."""
        transfer = self._transfers.get(header.transfer_id)
        if transfer is None or transfer.state is not InboundState.RECEIVING or transfer.assembler is None:
            return
        total_bytes = transfer.assembler.total_bytes
        if transfer.request.peer_name == peer and header.offset != total_bytes:
            text = f"the sender counts {header.offset} bytes, the receiver {total_bytes}"
            self._fail(transfer, "protocol", text, now=now)

    # Ending

    def cancel(self, transfer_id: bytes, reason: FailureReason, message: str, *, now: float) -> None:
        """End a transfer for the caller: ReceiveFailed does not follow, ReceiveMemoryFree does."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.is_active:
            self._fail(transfer, reason, message, now=now, is_reported=False)

    def cancelled(self, connection: C, peer: str, transfer_id: bytes, ending: EndReason, *, now: float) -> bytes | None:
        """Take a CANCEL of the sender. Return the frame that answers it unless a reply is queued.

        A CANCEL may arrive before its OPEN, on another connection. It is remembered, so that the OPEN is refused.

        Raises:
            RemoteProtocolError: the peer cancels too many transfers that it never opened.
        """
        reason, message = ending.reason, shorten(ending.message)
        transfer, outcome = self._transfers.get(transfer_id), self._ended.get(peer, transfer_id)
        if transfer is not None and transfer.request.peer_name == peer and transfer.is_active:
            transfer.connections[connection] = None
            self._fail(transfer, reason, message, now=now)
        elif transfer is None and outcome is None:
            self._admission.count_stray_cancel(peer, now=now)
            outcome = error_frame(transfer_id, reason, message)
            self._ended.put(peer, transfer_id, outcome)
            self.events.append(ReceiveFailed(transfer_id, peer, reason, message))
        return outcome

    def _complete(self, transfer: InboundTransfer[C], now: float, *, before_done: bytes = b"") -> None:
        transfer_id, stats = transfer.request.transfer_id, transfer.stats
        self._end(transfer, InboundEvent.COMPLETE, before_done + messages.encode_done(transfer_id, stats), now)
        self.events.append(ReceiveCompleted(transfer_id, stats))
        self._release(transfer)

    def _fail(
        self, transfer: InboundTransfer[C], reason: FailureReason, message: str, *, now: float, is_reported: bool = True
    ) -> None:
        transfer_id, peer = transfer.request.transfer_id, transfer.request.peer_name
        self._end(transfer, InboundEvent.FAIL, error_frame(transfer_id, reason, message), now)
        if is_reported:
            self.events.append(ReceiveFailed(transfer_id, peer, reason, message, transfer.stats))
        self._release(transfer)

    def _end(self, transfer: InboundTransfer[C], event: InboundEvent, frame: bytes, now: float) -> None:
        transfer.advance(event)
        transfer.ended_at = now
        self._reply_last(transfer, frame)
        self._ended.put(transfer.request.peer_name, transfer.request.transfer_id, frame)

    def _reply_last(self, transfer: InboundTransfer[C], frame: bytes) -> None:
        self.replies.append(Reply(transfer.request.transfer_id, frame, tuple(transfer.connections)))

    def _release(self, transfer: InboundTransfer[C]) -> None:
        """Forget an ended transfer once no connection writes to its memory and the caller has decided."""
        if transfer.state is InboundState.CLOSING and not transfer.writers:
            transfer.advance(InboundEvent.RELEASE)
            self._remove(transfer)
            self.events.append(ReceiveMemoryFree(transfer.request.transfer_id))

    def _remove(self, transfer: InboundTransfer[C]) -> None:
        del self._transfers[transfer.request.transfer_id]
        self._admission.release(transfer.request, transfer.fragments)

    # Connections and time

    def connected(self, connection: C, peer: str, *, has_heartbeats: bool) -> None:
        """Note a new connection of a peer; `disconnected` follows."""
        self._peer_connections[peer][connection] = has_heartbeats

    def awaited_connections(self) -> dict[str, list[C]]:
        """Return the connections of each peer with an active transfer that sends heartbeats."""
        peers = {transfer.request.peer_name for transfer in self._transfers.values() if transfer.is_active}
        connections = {peer: self._peer_connections.get(peer, {}) for peer in peers}
        return {peer: list(found) for peer, found in connections.items() if found and all(found.values())}

    def disconnected(self, connection: C, peer: str, *, now: float) -> None:
        """Note the end of a connection."""
        self._peer_connections[peer].pop(connection, None)
        if not self._peer_connections[peer]:
            del self._peer_connections[peer]
        for transfer in self._transfers.values():
            transfer.connection_lost(connection, now=now)

    def tick(self, now: float, *, heard_at: Mapping[str, float]) -> Upkeep[C]:
        """Fail overdue transfers. Return the connections to abort or to send REOPEN on.

        `heard_at` has the time of the latest sign of life of the peers in `awaited_connections`.
        """
        upkeep: Upkeep[C] = Upkeep()
        interval_seconds = REOPEN_RATIO * self._silence_seconds
        for transfer in list(self._transfers.values()):
            if transfer.ended_at is not None and now - transfer.ended_at > STUCK_WRITE_SECONDS:
                upkeep.aborts += transfer.writers
            peer_heard_at = heard_at.get(transfer.request.peer_name, now)
            reason = transfer.overdue_reason(now, silence_seconds=self._silence_seconds, heard_at=peer_heard_at)
            if reason is not None:
                message = f"{transfer.request.peer_name} did not finish: {reason}"
                self._fail(transfer, reason, message, now=now)
            elif transfer.needs_reopen(now, interval_seconds=interval_seconds):
                upkeep.reopens += self._reopens(transfer)
        return upkeep

    def _reopens(self, transfer: InboundTransfer[C]) -> list[tuple[C, bytes]]:
        """Return a REOPEN for a few connections of the peer, other ones each time."""
        connections = self._peer_connections.get(transfer.request.peer_name, {})
        count = min(len(connections), REOPEN_CONNECTIONS)
        first = transfer.num_reopens * REOPEN_CONNECTIONS
        transfer.num_reopens += 1
        chosen = itertools.islice(itertools.cycle(connections), first, first + count)
        return [(connection, reopen_frame(transfer.request.transfer_id)) for connection in chosen]


def reopen_frame(transfer_id: bytes) -> bytes:
    return Header(FrameType.REOPEN, 0, transfer_id).encode()


def error_frame(transfer_id: bytes, reason: FailureReason, message: str) -> bytes:
    """Return the ERROR of a transfer, with a message short enough to be remembered."""
    return messages.encode_ending(FrameType.ERROR, transfer_id, EndReason(reason, shorten(message)))


def shorten(message: str) -> str:
    """Return as much of a message as is remembered."""
    return message.encode(errors="replace")[:MAX_ENDED_MESSAGE_BYTES].decode(errors="ignore")
