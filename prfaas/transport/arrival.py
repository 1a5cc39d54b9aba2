"""One transfer that arrives, as far as it has come."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from prfaas.transport import messages
from prfaas.transport.admission import Pieces
from prfaas.transport.answers import Answer
from prfaas.transport.area import Slab
from prfaas.transport.assembler import Assembler
from prfaas.transport.connection import Connection
from prfaas.transport.inbound import Accepted, OpenRequest, TransferStats
from prfaas.transport.messages import MAX_SLABS, Done, Have
from prfaas.transport.ordered_events import OrderedEvents
from prfaas.types import FailureReason


@dataclass(eq=False)
class Arrival:
    """No lock of its own: `arrivals.Arrivals` holds its lock around every call. Times are monotonic seconds."""

    request: OpenRequest
    deadline: float
    answers: OrderedEvents[Answer]
    pieces: Pieces
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
