"""One transfer that arrives, as far as it has come."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from prfaas.transport.events import EventQueue
from prfaas.transport.net.connection import Connection
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import MAX_SLABS, Done, Ending, Have
from prfaas.transport.protocol.wire import FrameType
from prfaas.transport.ranges import Slab
from prfaas.transport.receiver.admission import FragmentQuota
from prfaas.transport.receiver.api import Accepted, OpenRequest, TransferStats
from prfaas.transport.receiver.assembler import Assembler
from prfaas.types import FailureReason


@dataclass(eq=False)
class Arrival:
    """No lock of its own: `arrivals.Arrivals` holds its lock around every call. Times are monotonic seconds."""

    request: OpenRequest
    deadline: float
    answers: EventQueue[Answer]
    pieces: FragmentQuota
    connections: dict[Connection, None]  # that carried anything of it; last is who opened it, or joined, last
    alone_since: float | None = None  # when its last connection went
    num_calls: int = 0  # how often its sender was asked for it since
    accepted: Accepted | None = None
    assembler: Assembler | None = None
    writers: dict[Connection, Slab] = field(default_factory=dict)
    wire_bytes: int = 0
    had_at: float = 0.0  # when a HAVE was last asked for that is said at once
    ended_at: float | None = None

    @property
    def has_ended(self) -> bool:
        return self.ended_at is not None

    @property
    def stats(self) -> TransferStats:
        return TransferStats(self.wire_bytes, self.assembler.num_changed if self.assembler else 0)

    @property
    def latest_first(self) -> list[Connection]:
        """Its connections, in the order in which an answer is tried on them."""
        return list(reversed(self.connections))

    def opened_over(self, connection: Connection) -> None:
        """Its sender has opened it again."""
        self.connections.pop(connection, None)
        self.connections[connection] = None
        self.alone_since = None

    def lost(self, connection: Connection, *, now: float) -> None:
        """A connection is gone, which may have carried something of it."""
        if connection in self.connections:
            del self.connections[connection]
            if not self.connections:
                self.alone_since, self.num_calls = now, 0

    def lateness(self, now: float, *, reconnect_seconds: float) -> FailureReason | None:
        """Why it ends now, if its time is up, or its sender gone."""
        if self.has_ended:
            return None
        if now >= self.deadline:
            return "deadline"
        alone = self.alone_since
        return "unreachable" if alone is not None and now - alone >= reconnect_seconds else None

    def is_called_for(self, now: float, *, each_seconds: float) -> bool:
        """Whether it has been without a connection for so long, or for as long again as when its sender was asked last."""
        alone = self.alone_since
        return alone is not None and not self.has_ended and now - alone >= (self.num_calls + 1) * each_seconds

    def done(self) -> bytes:
        """The frame that says that every byte is there."""
        stats = self.stats
        return messages.encode_done(self.request.transfer_id, Done(stats.wire_bytes, stats.checksum_failures))


def have_of(assembler: Assembler) -> Have:
    """What is there of a transfer, as far as a HAVE says it."""
    return Have(assembler.held, tuple(itertools.islice(assembler.arrived.slabs(), MAX_SLABS)))


MAX_UNSAID = 4096  # answers that no connection took at once
MAX_REMEMBERED_MESSAGE_BYTES = 100  # of why a transfer ended, which is remembered


class Answer(NamedTuple):
    """A frame for a transfer's sender, on any of these connections; an ending on all of them, as any may be dead already.

    None stands for a HAVE, made when it is said.
    """

    transfer_id: bytes
    connections: list[Connection]
    frame: bytes | None
    is_ending: bool = False


def have_later(transfer_id: bytes) -> Answer:
    """The HAVE of a transfer as it will be when it is said."""
    return Answer(transfer_id, [], None)


def error_of(transfer_id: bytes, reason: FailureReason, message: str) -> bytes:
    """The frame that says how a transfer ended without its data."""
    return messages.encode_ending(FrameType.ERROR, transfer_id, Ending(reason, shortened(message)))


def shortened(message: str) -> str:
    """So much of it as is remembered."""
    return message.encode(errors="replace")[:MAX_REMEMBERED_MESSAGE_BYTES].decode(errors="ignore")


class Answers:
    """All answers of a receiver, which any thread may say."""

    def __init__(self, make_have: Callable[[bytes], Answer | None]) -> None:
        """`make_have` makes a transfer's HAVE, without a frame where no connection takes one; None: the transfer has ended."""
        self._make_have = make_have
        self._lock = threading.Lock()
        self._unsaid: OrderedDict[bytes, Answer] = OrderedDict()  # by transfer

    def say(self, said: Answer) -> None:
        """Write a frame on the first connection that takes it at once, an ending on each; where none does, at a later tick."""
        answer = said if said.frame is not None else self._make_have(said.transfer_id)
        if answer is None:
            return
        outcomes = []
        for connection in answer.connections:
            outcomes.append("later" if answer.frame is None else say_at_once(connection, answer.frame))
            if outcomes[-1] == "said" and not answer.is_ending:
                break
        if "said" not in outcomes and "later" in outcomes:  # a sender that has lost all connections asks again
            self.say_later(said if said.is_ending else have_later(said.transfer_id))

    def say_later(self, answer: Answer) -> None:
        """At the next `say_again`; the latest of each transfer alone, which after an ending no HAVE is."""
        with self._lock:
            before = self._unsaid.get(answer.transfer_id)
            self._unsaid[answer.transfer_id] = before if before is not None and before.is_ending else answer
            if len(self._unsaid) > MAX_UNSAID:
                self._unsaid.popitem(last=False)

    def say_again(self) -> None:
        """Try what nobody took."""
        with self._lock:
            unsaid, self._unsaid = self._unsaid, OrderedDict()
        for answer in unsaid.values():
            self.say(answer)


def say(connection: Connection, frame: bytes) -> bool:
    """Write a frame; whether the connection took it."""
    try:
        connection.write(frame)
        return True
    except OSError:
        return False


def say_at_once(connection: Connection, frame: bytes) -> Literal["said", "later", "lost"]:
    """Write a frame on a connection that takes it without being waited for; one that is lost ends."""
    try:
        return "said" if connection.write_at_once(frame) else "later"
    except OSError:
        return "lost"
