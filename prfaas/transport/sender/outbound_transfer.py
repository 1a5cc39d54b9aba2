"""The CANCELs of a link until the peer has heard them (pure): what the kernel took of a connection that dies may not arrive."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from prfaas.errors import RemoteProtocolError
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import MAX_BODY_BYTES, Have, ObjectSizes
from prfaas.transport.ranges import Area, Ranges, Slab
from prfaas.transport.receiver.assembler import MAX_FRAGMENTS
from prfaas.transport.sender.api import SendRequest
from prfaas.types import FailureReason

MAX_CANCELS = 4096  # that wait for a connection, and for an answer; of more the oldest transfers end by their deadline


class _Cancel(NamedTuple):
    frame: bytes
    deadline: float  # of the transfer, when the peer gives it up by itself


class PendingCancels:
    """A CANCEL is said once, and again when a connection is lost before the peer has answered it."""

    def __init__(self) -> None:
        self.unsaid: dict[bytes, _Cancel] = {}  # by transfer, in order
        self._unanswered: dict[bytes, _Cancel] = {}

    @property
    def is_any(self) -> bool:
        """Whether there is one that the peer may not have heard."""
        return bool(self.unsaid or self._unanswered)

    def put(self, transfer_id: bytes, frame: bytes, *, deadline: float) -> None:
        """The peer is to hear this of a transfer."""
        _keep(self.unsaid, transfer_id, _Cancel(frame, deadline))

    def next_frame(self) -> tuple[bytes, bytes]:
        """The first that is unsaid, after its transfer, for a connection to say it."""
        transfer_id = next(iter(self.unsaid))
        cancel = self.unsaid.pop(transfer_id)
        _keep(self._unanswered, transfer_id, cancel)
        return transfer_id, cancel.frame

    def answered(self, transfer_id: bytes) -> None:
        """The peer has said how this transfer ended."""
        self._unanswered.pop(transfer_id, None)

    def connection_lost(self) -> None:
        """Any that was said may have been lost with it."""
        unheard = self._unanswered | self.unsaid
        self.unsaid = dict(itertools.islice(unheard.items(), max(0, len(unheard) - MAX_CANCELS), None))
        self._unanswered = {}

    def expire(self, now: float) -> None:
        """Of transfers whose deadline has passed nothing need be said."""
        for cancels in (self.unsaid, self._unanswered):
            for transfer_id in [its for its, cancel in cancels.items() if now >= cancel.deadline]:
                del cancels[transfer_id]


def _keep(cancels: dict[bytes, _Cancel], transfer_id: bytes, cancel: _Cancel) -> None:
    cancels[transfer_id] = cancel
    if len(cancels) > MAX_CANCELS:
        del cancels[next(iter(cancels))]


MAX_GAPS = 1 << 18  # between the slabs that have come, times the ranges of objects that the peer does not hold


@dataclass(frozen=True)
class PeerState:
    """To be made outside of any lock, as a long HAVE takes a second."""

    held: Ranges
    arrived: Area
    missing_bytes: int  # that must travel, or have

    @staticmethod
    def of(have: Have, sizes: ObjectSizes) -> PeerState:
        """Of what has arrived between many held objects some is left out, and comes again.

        Raises:
            RemoteProtocolError: it names what the transfer does not have.
        """
        last_held = have.held.to_list()[-1][1] if len(have.held) else 0
        if last_held > len(sizes) or not all(sizes.holds(slab) for slab in have.arrived):
            raise RemoteProtocolError("range", "HAVE of objects that the transfer does not have")
        arrived = have.arrived[: MAX_GAPS // (1 + len(have.held))]
        return PeerState(have.held, Area(arrived), sizes.total_bytes - sizes.bytes_of(have.held))


MIN_DEADLINE_SECONDS = 0.1  # that an OPEN names
SLOW_BYTES_PER_SECOND = 1e6  # an OPEN has so long for its bytes before it is repeated
MAX_CUTS = 4 * MAX_FRAGMENTS  # of what is ready, by objects that the peer holds, which keeps a quarter of that


@dataclass(eq=False)
class OutboundTransfer:
    """Times are monotonic seconds."""

    transfer: SendRequest
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
    waits_since: float | None = None  # for the peer's word, as `is_to_repeat` has seen it
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

    def lateness(self, now: float, *, unreachable_before: float) -> FailureReason | None:
        """Why it ends now, if its time is up; the peer has been out of reach for too long for those opened before then."""
        if self.has_ended:
            return None
        if now >= self.deadline:
            return "deadline"
        return "unreachable" if self.opened_at <= unreachable_before else None

    # OPEN and HAVE

    def open_frame(self, now: float) -> bytes:
        """The OPEN that leaves now."""
        transfer = self.transfer
        left = max(MIN_DEADLINE_SECONDS, self.deadline - now)
        opened = messages.Open(self.sizes, max(0, transfer.priority), left, transfer.open_body)
        return messages.encode_open(self.id, opened)

    def tell_whole(self) -> None:
        """From here on OPEN has the body that leaves nothing out, where the wire can carry it."""
        its = self.transfer
        body = its.whole_body() if its.whole_body is not None else b""
        if 0 < len(body) <= MAX_BODY_BYTES:
            self.transfer = replace(its, open_body=body, whole_body=None)

    def is_to_repeat(self, now: float, *, is_said: bool, patience_seconds: float) -> bool:
        """Whether OPEN is repeated for want of an answer, for which each time there is twice as long. To be asked often.

        `is_said`: nothing of it is still to leave.
        """
        if self.has_ended or not is_said or not self.awaits_answer:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = now
        elif now - self.waits_since > self._patience(patience_seconds):
            self.num_repeats += 1
            self.waits_since = None
            return True
        return False

    def _patience(self, least_seconds: float) -> float:
        """How long an answer may take until OPEN is repeated, which costs as much again as it is long."""
        return float((least_seconds + len(self.transfer.open_body) / SLOW_BYTES_PER_SECOND) * 2**self.num_repeats)

    def accepted(self, standing: PeerState) -> None:
        """The peer has answered OPEN; all that is ready is to be cut anew."""
        self.is_accepted, self.said_end = True, False
        self.waits_since, self.num_repeats = None, 0
        self.held, self.acked = standing.held, standing.arrived
        self.missing_bytes = self.unready_bytes = standing.missing_bytes
        self.num_cuts = 0

    # What is ready

    def make_ready(self, slab: Slab) -> list[Slab]:
        """These bytes may leave; returns those of them that might not before."""
        fresh = list(self.ready.missing(slab))
        self.ready.add(slab)
        return fresh

    def cut(self, slabs: list[Slab]) -> bool:
        """Count the pieces into which what the peer holds cuts these; False: there are too many of them."""
        self.num_cuts += sum(map(self._cuts_of, slabs))
        return self.num_cuts <= MAX_CUTS

    def _cuts_of(self, slab: Slab) -> int:
        """How many pieces more than one leave of a slab: what is held at its ends makes it shorter, and cuts nothing."""
        num_ends = (slab.first in self.held) + (slab.last - 1 in self.held)
        return max(0, self.held.num_between(slab.first, slab.last) - num_ends)

    def take_up(self, slab: Slab) -> Iterator[Slab]:
        """The parts of a slab that leave: of objects that the peer does not hold, where nothing has come yet. It is ready from
        here on."""
        for first, last in self.held.missing(slab.first, slab.last):
            wanted = Slab(first, last - first, slab.offset, slab.length)
            self.unready_bytes -= wanted.num_bytes
            yield from self.acked.missing(wanted)


def sizes_of(transfer: SendRequest) -> tuple[ObjectSizes, str]:
    """What it is made of, and why the wire cannot carry it; "": it can."""
    if len(transfer.open_body) > MAX_BODY_BYTES:
        return ObjectSizes(()), "its OPEN is longer than the wire allows"
    try:
        return ObjectSizes.of(transfer.object_bytes), ""
    except ValueError as error:
        return ObjectSizes(()), str(error)
