"""The transfers that leave over one link and the bytes of theirs that may: what its connections take from.

No threads and no locks of its own: `sender.Link` holds its lock around every call, and tells the events afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field, replace

from prfaas.errors import LocalProtocolError, RemoteProtocolError
from prfaas.transport import messages
from prfaas.transport.area import Area, Slab
from prfaas.transport.assembler import MAX_FRAGMENTS
from prfaas.transport.cancels import Cancels
from prfaas.transport.chunker import Chunk, Chunker, ChunkSize, chunk_size
from prfaas.transport.inbound import TransferStats
from prfaas.transport.messages import MAX_BODY_BYTES, Done, Ending, Have
from prfaas.transport.object_sizes import ObjectSizes
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

MAX_ENDS = 4096  # waiting for a connection; the oldest are dropped, whose transfers ask again
MIN_DEADLINE_SECONDS = 0.1  # that an OPEN names
SLOW_BYTES_PER_SECOND = 1e6  # an OPEN has so long for its bytes before it is repeated
MAX_GAPS = 1 << 18  # between the slabs that have come, times the ranges of objects that the peer does not hold
MAX_CUTS = 4 * MAX_FRAGMENTS  # of what is ready, by objects that the peer holds, which keeps a quarter of that


@dataclass(frozen=True)
class Standing:
    """What a HAVE says of a transfer. Made outside of any lock, as a long HAVE takes a second."""

    held: Ranges
    arrived: Area
    missing_bytes: int  # that must travel, or have

    @staticmethod
    def of(have: Have, sizes: ObjectSizes) -> Standing:
        """Of what has arrived between many held objects some is left out, and comes again.

        Raises:
            RemoteProtocolError: it names what the transfer does not have.
        """
        last_held = have.held.to_list()[-1][1] if len(have.held) else 0
        if last_held > len(sizes) or not all(sizes.holds(slab) for slab in have.arrived):
            raise RemoteProtocolError("range", "HAVE of objects that the transfer does not have")
        arrived = have.arrived[: MAX_GAPS // (1 + len(have.held))]
        return Standing(have.held, Area(arrived), sizes.total_bytes - sizes.bytes_of(have.held))


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
    num_cuts: int = 0  # of what is ready, by what is held
    missing_bytes: int = 0  # that must travel
    unready_bytes: int = 0  # of those
    said_end: bool = False
    num_users: int = 0  # threads that read its memory
    waits_since: float | None = None  # for the peer's word, as `ask_again` has seen it
    num_repeats: int = 0  # of its OPEN, for want of an answer
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

    @property
    def is_owed(self) -> bool:
        """Whether the next word is the peer's, or what may leave has not all come."""
        return self.awaits_answer or self.acked.num_bytes + self.unready_bytes < self.missing_bytes

    def patience(self, least_seconds: float) -> float:
        """How long an answer may take until OPEN is repeated, which costs as much again as it is long."""
        return float((least_seconds + len(self.transfer.open_body) / SLOW_BYTES_PER_SECOND) * 2**self.num_repeats)

    def cuts_of(self, slab: Slab) -> int:
        """How many pieces more than one leave of a slab: what is held at its ends makes it shorter, and cuts nothing."""
        num_ends = (slab.first in self.held) + (slab.last - 1 in self.held)
        return max(0, self.held.num_between(slab.first, slab.last) - num_ends)

    def wanted(self, slab: Slab) -> Iterator[Slab]:
        """The parts of a slab whose objects the peer does not hold."""
        for first, last in self.held.missing(slab.first, slab.last):
            yield Slab(first, last - first, slab.offset, slab.length)


class Outbox:
    """Transfers by id, the queue of their ready bytes, and the control frames that any connection may carry."""

    def __init__(self, on_event: Callable[[SendEvent], None], *, num_connections: int) -> None:
        """`on_event` is called within the calls below."""
        self._on_event = on_event
        self._chunker = Chunker(num_connections)
        self._sendings: dict[bytes, _Sending] = {}
        self._to_open: dict[bytes, _Sending] = {}  # in order
        self._cancels = Cancels()
        self._ends: deque[bytes] = deque(maxlen=MAX_ENDS)
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
        return any(its.is_owed for its in self._sendings.values() if not its.has_ended)

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

    def open(self, transfer: Outgoing, *, now: float) -> None:
        """Offer a transfer to the peer; one that the wire cannot carry fails with its reason.

        Raises:
            LocalProtocolError: it is open already.
        """
        if transfer.transfer_id in self._sendings:
            raise LocalProtocolError(f"transfer {transfer.transfer_id.hex()} is open already")
        sizes, objection = _sizes_of(transfer)
        sending = _Sending(transfer, sizes, now)
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
        fresh = list(sending.ready.missing(slab))
        sending.ready.add(slab)
        if sending.is_accepted:
            self._queue(sending, fresh, now=now)
        return sending.is_accepted

    def prioritise(self, transfer_id: bytes, priority: int) -> None:
        """A transfer has become more or less urgent."""
        sending = self._live(transfer_id)
        if sending is not None and priority != sending.transfer.priority:
            sending.transfer = replace(sending.transfer, priority=priority)
            self._chunker.prioritise(transfer_id, priority)

    def _live(self, transfer_id: bytes) -> _Sending | None:
        sending = self._sendings.get(transfer_id)
        return None if sending is None or sending.has_ended else sending

    def _queue(self, sending: _Sending, slabs: list[Slab], *, now: float) -> None:
        """Have the parts of these that the peer lacks leave; a transfer that this would cut too finely ends."""
        sending.num_cuts += sum(map(sending.cuts_of, slabs))
        if sending.num_cuts > MAX_CUTS:
            text = f"what the peer holds would cut what it lacks into more than {MAX_CUTS} pieces"
            self.cancel(sending.id, Ending("protocol", text), now=now)
            return
        for slab in slabs:
            for wanted in sending.wanted(slab):
                sending.unready_bytes -= wanted.num_bytes
                for gap in sending.acked.missing(wanted):
                    self._chunker.ready(sending.id, gap)

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
        reasons = {its.id: _lateness(its, now, unreachable_before) for its in self._sendings.values()}
        return [(transfer_id, reason) for transfer_id, reason in reasons.items() if reason is not None]

    def stuck(self, *, ended_before: float) -> set[bytes]:
        """Transfers that ended before then and whose memory a connection still reads."""
        return {its.id for its in self._sendings.values() if its.ended_at is not None and its.ended_at < ended_before}

    # What the connections take

    def has_work(self) -> bool:
        """Whether something waits for a connection."""
        return bool(self._cancels.unsaid or self._ends or self._to_open) or self._chunker.has_work()

    def next_frame(self, *, now: float) -> bytes | None:
        """A control frame that waits for a connection; they go before bytes."""
        if self._cancels.unsaid:
            return self._cancels.next_frame()
        if self._ends:
            return self._ends.popleft()
        if self._to_open:
            return _open_frame(self._to_open.pop(next(iter(self._to_open))), now)
        return None

    def take(self) -> tuple[Chunk, Outgoing] | None:
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

    def _say_end(self, sending: _Sending) -> bool:
        is_all = sending.is_accepted and not sending.unready_bytes and self._chunker.is_drained(sending.id)
        if not is_all or sending.said_end:
            return False
        sending.said_end = True
        self._ends.append(Header(FrameType.END, 0, sending.id, offset=sending.missing_bytes).encode())
        return True

    # What the peer says

    def sizes_of(self, transfer_id: bytes) -> ObjectSizes | None:
        """The objects of a transfer whose HAVE is awaited; None: there is no such transfer."""
        sending = self._live(transfer_id)
        return None if sending is None or sending.is_accepted else sending.sizes

    def have(self, transfer_id: bytes, standing: Standing, *, process: bytes, now: float) -> None:
        """This process of the peer has accepted a transfer and says what it holds; all else that is ready may leave."""
        sending = self._live(transfer_id)
        if sending is None or sending.is_accepted:
            return
        sending.is_accepted = True
        sending.said_end = False
        sending.waits_since, sending.num_repeats = None, 0
        sending.held, sending.acked = standing.held, standing.arrived
        sending.missing_bytes = sending.unready_bytes = standing.missing_bytes
        if not sending.was_accepted:
            sending.was_accepted = True
            self._on_event(SendAccepted(transfer_id, sending.missing_bytes, standing.held.copy(), process))
        sending.num_cuts = 0
        self._queue(sending, list(sending.ready.slabs()), now=now)

    def landed(self, chunks: Iterable[Chunk], *, time_ns: int) -> None:
        """Chunks have arrived whole."""
        grown: dict[bytes, _Sending] = {}
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
            if sending.has_ended or not is_said or not sending.awaits_answer:
                sending.waits_since = None
            elif sending.waits_since is None:
                sending.waits_since = now
            elif now - sending.waits_since > sending.patience(patience_seconds):
                sending.num_repeats += 1
                sending.waits_since = None
                self._open_again(sending)
                is_any = True
        return is_any

    def _open_again(self, sending: _Sending) -> None:
        sending.is_accepted = False
        if not sending.has_ended:
            sending.transfer = _told_whole(sending.transfer)
            self._to_open[sending.id] = sending
        self._chunker.clear(sending.id)  # HAVE tells what is still to be sent

    # Ending

    def _end(self, sending: _Sending, event: SendCompleted | SendFailed, now: float) -> None:
        if sending.has_ended:
            return
        sending.ended_at = now
        self._chunker.remove(sending.id)
        self._to_open.pop(sending.id, None)
        self._on_event(event)
        self._free(sending)

    def _free(self, sending: _Sending) -> None:
        if sending.num_users == 0 and self._sendings.pop(sending.id, None) is not None:
            self._on_event(SendMemoryFree(sending.id))


def _told_whole(transfer: Outgoing) -> Outgoing:
    """With the body that leaves nothing out, where the wire can carry it."""
    body = transfer.whole_body() if transfer.whole_body is not None else b""
    return replace(transfer, open_body=body, whole_body=None) if 0 < len(body) <= MAX_BODY_BYTES else transfer


def _sizes_of(transfer: Outgoing) -> tuple[ObjectSizes, str]:
    """What it is made of, and why the wire cannot carry it; "": it can."""
    if len(transfer.open_body) > MAX_BODY_BYTES:
        return ObjectSizes(()), "its OPEN is longer than the wire allows"
    try:
        return ObjectSizes.of(transfer.object_bytes), ""
    except ValueError as error:
        return ObjectSizes(()), str(error)


def _lateness(sending: _Sending, now: float, unreachable_before: float) -> FailureReason | None:
    if sending.has_ended:
        return None
    if now >= sending.deadline:
        return "deadline"
    return "unreachable" if sending.opened_at <= unreachable_before else None


def _open_frame(sending: _Sending, now: float) -> bytes:
    transfer = sending.transfer
    left = max(MIN_DEADLINE_SECONDS, sending.deadline - now)
    opened = messages.Open(sending.sizes, max(0, transfer.priority), left, transfer.open_body)
    return messages.encode_open(sending.id, opened)
