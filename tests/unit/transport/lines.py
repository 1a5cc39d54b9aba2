"""Lines whose connections end in this process, and a link without threads for which they do."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import cast

from prfaas.transport.codec.packing import CODECS, TRIAL_BYTES
from prfaas.transport.events import EventQueue
from prfaas.transport.net.connection import Connection
from prfaas.transport.protocol.messages import Have, encode_have
from prfaas.transport.protocol.wire import HEADER_BYTES, ConnectionState, Header
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.sender.api import SendEvent, SendRequest
from prfaas.transport.sender.connection_worker import ChunkTask, ConnectionWorker, ConnectionWorkers, WorkSource
from prfaas.transport.sender.link import LinkWork
from prfaas.transport.sender.outbox import Outbox
from prfaas.transport.sender.stats import LinkMonitor

ID, FIRST = b"t" * 16, b"f" * 16
NUM_BYTES = TRIAL_BYTES


@contextlib.contextmanager
def two_lines(
    work: WorkSource | None = None, *, generation: int = 0
) -> Iterator[tuple[ConnectionWorker, ConnectionWorker]]:
    """Nobody runs them; without `work` nobody may."""
    with contextlib.ExitStack() as stack:
        made = []
        for end in socket.socketpair():
            connection = stack.enter_context(contextlib.closing(Connection(end, state=ConnectionState.SENDING)))
            made.append(
                ConnectionWorker(cast(WorkSource, work), connection, generation=generation, capabilities=CODECS)
            )
        yield made[0], made[1]


class Site:
    """With one transfer that is ready; the first process of its peer answers."""

    def __init__(self) -> None:
        self.events: list[SendEvent] = []
        told = EventQueue(self.events.append)
        self.changed, self.is_wanted = threading.Condition(), True
        self.outbox = Outbox(told.put, num_connections=1)
        self.lines, self.gauge = ConnectionWorkers(), LinkMonitor()
        self.lines.lead_to(FIRST)
        self.rates: list[float] = []  # that the peer wants
        self.work = LinkWork(
            self.changed,
            outbox=self.outbox,
            lines=self.lines,
            gauge=self.gauge,
            events=told,
            is_wanted=lambda: self.is_wanted,
            heed_rate=self.rates.append,
        )
        self.outbox.open(
            SendRequest(ID, b"", [NUM_BYTES], lambda index: memoryview(bytes(NUM_BYTES)), 0, 60.0), now=0.0
        )
        self.outbox.ready(ID, Slab(0, 1, 0, NUM_BYTES), now=0.0)

    def hear_have(self, line: ConnectionWorker, *, transfer_id: bytes = ID, damage: bytes = b"") -> None:
        frame = encode_have(transfer_id, Have(Ranges(), ()))
        self.work.have(line, Header.decode(frame[:HEADER_BYTES]), bytearray(frame[HEADER_BYTES:] + damage))

    def take(self, line: ConnectionWorker) -> ChunkTask:
        taken = self.work.take(line)
        assert isinstance(taken, ChunkTask)
        return taken
