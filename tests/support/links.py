"""A link whose connections end in the test process, and objects to send over it."""

import contextlib
import socket
from collections.abc import Iterator

from prfaas.transport.codec.packing import CODECS, TRIAL_BYTES
from prfaas.transport.net.connection import Connection
from prfaas.transport.protocol.messages import Have, encode_have
from prfaas.transport.protocol.wire import HEADER_BYTES, ConnectionState, Header
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.sender.api import SendEvent, SendRequest
from prfaas.transport.sender.connection_worker import ChunkTask, ConnectionWorker, ConnectionWorkers
from prfaas.transport.sender.link import Link, LinkConfig

TRANSFER_ID, FIRST_PROCESS = b"t" * 16, b"f" * 16
NUM_BYTES = TRIAL_BYTES


class IdleLink(Link):
    """Link without threads, with one transfer whose bytes are ready. The first process of its peer answers."""

    def __init__(self) -> None:
        self.events: list[SendEvent] = []
        config = LinkConfig(awaits_peer=True)
        super().__init__(
            "nowhere:1", config=config, local_name="near", peer_name="far", key=b"k", on_event=self.events.append
        )
        self.outbox, self.workers, self.monitor = self._outbox, self._workers, self._monitor
        self.workers.set_process(FIRST_PROCESS)
        source = memoryview(bytes(NUM_BYTES))
        self.outbox.open(SendRequest(TRANSFER_ID, b"", [NUM_BYTES], lambda index: source, 0, 60.0), now=0.0)
        self.outbox.ready(TRANSFER_ID, Slab(0, 1, 0, NUM_BYTES), now=0.0)

    def expire(self) -> None:
        """Let the link be unused for so long that it keeps no connection."""
        self._dialler.is_wanted = lambda: False  # type: ignore[method-assign]

    def hear_have(self, worker: ConnectionWorker, *, transfer_id: bytes = TRANSFER_ID, suffix: bytes = b"") -> None:
        """Deliver a HAVE of nothing; `suffix` makes it malformed."""
        frame = encode_have(transfer_id, Have(Ranges(), ()))
        self.on_have(worker, Header.decode(frame[:HEADER_BYTES]), bytearray(frame[HEADER_BYTES:] + suffix))

    def take_chunk(self, worker: ConnectionWorker) -> ChunkTask:
        task = self.take(worker)
        assert isinstance(task, ChunkTask)
        return task


@contextlib.contextmanager
def two_workers(link: Link, workers: ConnectionWorkers) -> Iterator[tuple[ConnectionWorker, ConnectionWorker]]:
    """Yield two workers of a link's present generation, which nobody runs."""
    with contextlib.ExitStack() as stack:
        made = []
        for end in socket.socketpair():
            connection = stack.enter_context(contextlib.closing(Connection(end, state=ConnectionState.SENDING)))
            worker = ConnectionWorker(link, connection, generation=workers.generation, capabilities=CODECS)
            workers.add(worker)
            made.append(worker)
        yield made[0], made[1]
