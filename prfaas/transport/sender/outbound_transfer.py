"""State of one outbound transfer: its state machine, and the byte ranges that are ready, held or acknowledged.

Pure: callers hold the link's lock and pass the time as monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from prfaas.errors import RemoteProtocolError
from prfaas.state_machine import TransitionTable
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import MAX_BODY_BYTES, Have, ObjectSizes
from prfaas.transport.ranges import Area, Ranges, Slab
from prfaas.transport.receiver.assembler import MAX_FRAGMENTS
from prfaas.transport.sender.api import SendRequest
from prfaas.types import FailureReason

MAX_GAPS = 1 << 18  # Arrived slabs times ranges of held objects that a HAVE may name.
MIN_DEADLINE_SECONDS = 0.1  # Shortest remaining time that an OPEN states.
SLOW_BYTES_PER_SECOND = 1e6  # Assumed rate of a long OPEN until it is repeated.
MAX_CUTS = 4 * MAX_FRAGMENTS  # Pieces into which held objects may cut the ready ranges.


class OutboundState(Enum):
    """State of an outbound transfer."""

    OPENING = "the latest OPEN is unanswered"
    SENDING = "the peer has said what it lacks"
    COMPLETED = "the peer has every byte, and the memory may still be read"
    FAILED = "given up, and the memory may still be read"
    RELEASED = "memory is free"


class OutboundEvent(Enum):
    """Event that moves an outbound transfer to another state."""

    ACCEPT = "HAVE arrives"
    REOPEN = "OPEN leaves again, as the peer may not know the transfer"
    COMPLETE = "DONE arrives"
    FAIL = "cancelled, late, unreachable, or rejected by the peer"
    RELEASE = "the last reader has left"


TRANSITIONS = TransitionTable(
    "outbound transfer",
    OutboundState.OPENING,
    {
        (OutboundState.OPENING, OutboundEvent.ACCEPT): OutboundState.SENDING,
        (OutboundState.OPENING, OutboundEvent.REOPEN): OutboundState.OPENING,
        (OutboundState.OPENING, OutboundEvent.COMPLETE): OutboundState.COMPLETED,
        (OutboundState.OPENING, OutboundEvent.FAIL): OutboundState.FAILED,
        (OutboundState.SENDING, OutboundEvent.REOPEN): OutboundState.OPENING,
        (OutboundState.SENDING, OutboundEvent.COMPLETE): OutboundState.COMPLETED,
        (OutboundState.SENDING, OutboundEvent.FAIL): OutboundState.FAILED,
        (OutboundState.COMPLETED, OutboundEvent.RELEASE): OutboundState.RELEASED,
        (OutboundState.FAILED, OutboundEvent.RELEASE): OutboundState.RELEASED,
    },
)


@dataclass(frozen=True)
class PeerState:
    """Bytes of a transfer that the peer has, according to its HAVE. Build it outside of locks: a long HAVE takes a second."""

    held: Ranges
    arrived: Area
    missing_bytes: int  # Bytes of the objects that the peer does not hold, arrived or not.

    @staticmethod
    def of(have: Have, sizes: ObjectSizes) -> PeerState:
        """Check a HAVE against the transfer's objects.

        Drops some of the arrived slabs between very many held objects. They travel again.

        Raises:
            RemoteProtocolError: the HAVE names objects or bytes that the transfer does not have.
        """
        last_held = have.held.to_list()[-1][1] if len(have.held) else 0
        if last_held > len(sizes) or not all(sizes.holds(slab) for slab in have.arrived):
            raise RemoteProtocolError("range", "HAVE names objects that the transfer does not have")
        arrived = have.arrived[: MAX_GAPS // (1 + len(have.held))]
        return PeerState(have.held, Area(arrived), sizes.total_bytes - sizes.bytes_of(have.held))


@dataclass(eq=False)
class OutboundTransfer:
    """One transfer that leaves over a link."""

    request: SendRequest
    sizes: ObjectSizes
    opened_at: float
    state: OutboundState = TRANSITIONS.initial
    was_accepted: bool = False
    ready: Area = field(default_factory=Area)
    acked: Area = field(default_factory=Area)
    held: Ranges = field(default_factory=Ranges)
    num_cuts: int = 0
    missing_bytes: int = 0
    unready_bytes: int = 0  # Part of `missing_bytes` that is not ready.
    has_queued_end: bool = False
    num_readers: int = 0  # Connections that read the memory.
    waits_since: float | None = None  # Start of the wait for the peer's answer, as `repeats_open` has seen it.
    num_repeats: int = 0  # Repetitions of the latest OPEN.
    ended_at: float | None = None

    @property
    def id(self) -> bytes:
        return self.request.transfer_id

    @property
    def deadline(self) -> float:
        return self.opened_at + self.request.deadline_seconds

    @property
    def is_sending(self) -> bool:
        return self.state is OutboundState.SENDING

    @property
    def has_ended(self) -> bool:
        return self.ended_at is not None

    @property
    def awaits_answer(self) -> bool:
        """Return whether the peer must speak next. A lost connection may have carried its answer."""
        return not self.is_sending or self.acked.num_bytes == self.missing_bytes

    @property
    def awaits_peer(self) -> bool:
        """Return whether the peer must answer, or must acknowledge bytes that are ready."""
        return self.awaits_answer or self.acked.num_bytes + self.unready_bytes < self.missing_bytes

    def lateness(self, now: float, *, unreachable_before: float) -> FailureReason | None:
        """Return why the transfer must end now, or None.

        A peer that is unreachable ends the transfers that were opened before `unreachable_before`.
        """
        if self.has_ended:
            return None
        if now >= self.deadline:
            return "deadline"
        return "unreachable" if self.opened_at <= unreachable_before else None

    def advance(self, event: OutboundEvent) -> None:
        """Change the state.

        Raises:
            LocalProtocolError: the event is not allowed in the present state.
        """
        self.state = TRANSITIONS.next(self.state, event)

    # OPEN and HAVE

    def open_frame(self, now: float) -> bytes:
        """Return the OPEN frame to send now."""
        remaining_seconds = max(MIN_DEADLINE_SECONDS, self.deadline - now)
        priority = max(0, self.request.priority)
        return messages.encode_open(
            self.id, messages.Open(self.sizes, priority, remaining_seconds, self.request.open_body)
        )

    def reopen(self) -> None:
        """Return to OPENING."""
        self.advance(OutboundEvent.REOPEN)

    def repeats_open(self, now: float, *, has_left: bool, patience_seconds: float) -> bool:
        """Return whether to repeat OPEN because no answer came. Call often.

        The wait doubles with each repetition. It starts when the previous frame has left completely (`has_left`).
        """
        if self.has_ended or not has_left or not self.awaits_answer:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = now
        else:
            # A long OPEN costs as much again when it is repeated.
            frame_seconds = len(self.request.open_body) / SLOW_BYTES_PER_SECOND
            if now - self.waits_since > (patience_seconds + frame_seconds) * 2**self.num_repeats:
                self.num_repeats += 1
                self.waits_since = None
                return True
        return False

    def accept(self, peer_state: PeerState) -> None:
        """Take the peer's answer to OPEN. Everything that is ready must be queued again."""
        self.advance(OutboundEvent.ACCEPT)
        self.has_queued_end = False
        self.waits_since, self.num_repeats, self.num_cuts = None, 0, 0
        self.held, self.acked = peer_state.held, peer_state.arrived
        self.missing_bytes = self.unready_bytes = peer_state.missing_bytes

    # Ready bytes

    def make_ready(self, slab: Slab) -> list[Slab]:
        """Mark bytes as ready. Returns the parts that were not ready before."""
        fresh = list(self.ready.missing(slab))
        self.ready.add(slab)
        return fresh

    def count_cuts(self, slabs: list[Slab]) -> bool:
        """Count the pieces into which held objects cut these slabs. Returns False if there are too many."""
        for slab in slabs:
            # Held objects at the ends of a slab shorten it without cutting it.
            num_ends = (slab.first in self.held) + (slab.last - 1 in self.held)
            self.num_cuts += max(0, self.held.num_between(slab.first, slab.last) - num_ends)
        return self.num_cuts <= MAX_CUTS

    def parts_to_send(self, slab: Slab) -> Iterator[Slab]:
        """Yield the parts of a ready slab that the peer neither holds nor has received. Call once per slab."""
        for first, last in self.held.missing(slab.first, slab.last):
            wanted = Slab(first, last - first, slab.offset, slab.length)
            self.unready_bytes -= wanted.num_bytes
            yield from self.acked.missing(wanted)


def wire_sizes(request: SendRequest) -> tuple[ObjectSizes, str]:
    """Return the sizes of the request's objects, and why the wire cannot carry the request ("" if it can)."""
    if len(request.open_body) > MAX_BODY_BYTES:
        return ObjectSizes(()), "OPEN is longer than the wire allows"
    try:
        return ObjectSizes.of(request.object_bytes), ""
    except ValueError as error:
        return ObjectSizes(()), str(error)
