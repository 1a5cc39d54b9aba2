"""Thread-safe front of the inbound transfers: one lock, events to the caller, replies to the senders."""

import contextlib
import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from prfaas.errors import LocalProtocolError, RemoteProtocolError
from prfaas.transport.events import EventQueue
from prfaas.transport.net.connection import Connection
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.wire import Header
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.receiver.api import AcceptFunction, Decision, OpenRequest, ReceiveEvent, Rejection
from prfaas.transport.receiver.assembler import Assembler
from prfaas.transport.receiver.transfers import ChunkOutcome, InboundTransfer, InboundTransfers, Reply

MAX_PENDING_REPLIES = 4096
RIVAL_SECONDS = 5.0  # Time for an aborted connection to stop writing.


class InboundDispatcher:
    """Inbound transfers for the threads that read connections. The lock is never held while a peer is awaited."""

    def __init__(
        self, *, accept: AcceptFunction, on_event: Callable[[ReceiveEvent], None], silence_seconds: float
    ) -> None:
        self._accept = accept
        self._events: EventQueue[ReceiveEvent] = EventQueue(on_event)
        self._replies = ReplyQueue(self._latest_have)
        self._changed = threading.Condition(threading.Lock())
        self._transfers: InboundTransfers[Connection] = InboundTransfers(silence_seconds=silence_seconds)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[InboundTransfers[Connection]]:
        """Hold the lock for the block, then deliver the events and replies that the block has caused."""
        with self._changed:
            yield self._transfers
            due = self._collect()
        self._deliver(due)

    def _collect(self) -> list[bytes]:
        """Queue what the transfers have caused, and return the ids of transfers with due replies."""
        transfers = self._transfers
        for event in transfers.events:
            self._events.put(event)
        for reply in transfers.replies:
            self._replies.put(reply)
        due = [reply.transfer_id for reply in transfers.replies if not reply.is_delayed]
        transfers.events.clear()
        transfers.replies.clear()
        return due

    def _deliver(self, due: list[bytes]) -> None:
        self._events.deliver()
        for transfer_id in due:
            self._replies.send(transfer_id)

    def open(self, connection: Connection, request: OpenRequest) -> None:
        """Take an OPEN, which a sender repeats after it has lost a connection."""
        transfer = None
        with self.exclusive() as transfers:
            refusal = transfers.refusal(request)
            if refusal is None:
                transfer = transfers.open(connection, request, now=time.monotonic())
        if refusal is not None:
            connection.try_write(refusal)
        if transfer is not None:
            self._accept(request, functools.partial(self._decide, transfer))

    def _decide(self, transfer: InboundTransfer[Connection], decision: Decision) -> None:
        if isinstance(decision, Rejection):
            with self.exclusive() as transfers:
                transfers.reject(transfer, decision)
            return
        held = Ranges((index, index + 1) for index in decision.held)
        assembler = Assembler(transfer.request.object_bytes, held)
        with self.exclusive() as transfers:
            transfers.accept(transfer, decision, assembler, now=time.monotonic())

    def begin_write(
        self, connection: Connection, peer: str, header: Header, *, wire_bytes: int
    ) -> list[memoryview] | None:
        """Return the memory of a chunk, or None if it is not wanted.

        `end_write` must follow unless the chunk is not wanted. `wire_bytes` excludes the header.

        Raises:
            RemoteProtocolError: the peer may not send this chunk.
        """
        slab = header.slab
        with self._changed:
            transfer = self._transfers.on_chunk_header(connection, peer, header, wire_bytes=wire_bytes)
            if transfer is None:
                return None
            if transfer.writers and not self._changed.wait_for(
                lambda: self._abort_rivals(transfer, slab), RIVAL_SECONDS
            ):
                raise RemoteProtocolError("overlap", f"{slab} is still being written by another connection")
            if not transfer.begin_write(connection, slab):
                return None
            accepted = transfer.accepted
        assert accepted is not None
        try:
            views = [accepted.destination(index)[slab.offset : slab.end] for index in range(slab.first, slab.last)]
            if sum(map(len, views)) != slab.num_bytes:
                raise LocalProtocolError(f"the memory of {slab} is too short")
        except BaseException:
            self.end_write(connection, header, "lost")
            raise
        return views

    def _abort_rivals(self, transfer: InboundTransfer[Connection], slab: Slab) -> bool:
        """Abort connections that write to the same bytes: their sender has evidently given them up."""
        rivals = transfer.rivals(slab)
        for rival in rivals:
            rival.abort()
        return not rivals

    def end_write(self, connection: Connection, header: Header, outcome: ChunkOutcome) -> bool:
        """Take the outcome of a chunk. Return whether the sender must retransmit it."""
        with self._changed:
            is_retransmitted = self._transfers.end_write(connection, header, outcome, now=time.monotonic())
            self._changed.notify_all()
            has_output = bool(self._transfers.events or self._transfers.replies)
            due = self._collect() if has_output else []
        if has_output:
            self._deliver(due)
        return is_retransmitted

    def tick(self, now: float) -> None:
        """Fail overdue transfers, ask peers to reopen, abort stuck writers, and retry replies."""
        with self._changed:
            awaited = self._transfers.awaited_connections()
        heard_at = {
            peer: now - min(connection.quiet_seconds() for connection in connections)
            for peer, connections in awaited.items()
        }
        with self.exclusive() as transfers:
            upkeep = transfers.tick(now, heard_at=heard_at)
        for connection in upkeep.aborts:
            connection.abort()
        for connection, frame in upkeep.reopens:
            with contextlib.suppress(OSError):
                connection.write_at_once(frame)
        self._replies.send_all()

    def _latest_have(self, transfer_id: bytes) -> Reply[Connection] | None:
        """Return a transfer's HAVE, or None after its end. The frame is left out while no connection takes it."""
        with self._changed:
            transfer = self._transfers.get(transfer_id)
            if transfer is None or not transfer.is_active:
                return None
            connections = tuple(transfer.latest_first)
        if not any(connection.can_write_at_once() for connection in connections):
            return Reply(transfer_id, None, connections)
        with self._changed:
            have = transfer.have()
        return None if have is None else Reply(transfer_id, messages.encode_have(transfer_id, have), connections)


class ReplyQueue:
    """Replies that no connection has sent yet, at most one per transfer: a final reply replaces a HAVE."""

    def __init__(self, latest_have: Callable[[bytes], Reply[Connection] | None]) -> None:
        """`latest_have` makes the HAVE of a transfer, or returns None after its end."""
        self._latest_have = latest_have
        self._lock = threading.Lock()
        self._pending: OrderedDict[bytes, Reply[Connection]] = OrderedDict()
        self._sending: set[bytes] = set()

    def put(self, reply: Reply[Connection]) -> None:
        """Queue a reply. Beyond the limit the oldest is dropped; its sender asks again."""
        with self._lock:
            pending = self._pending.get(reply.transfer_id)
            if pending is None or pending.frame is None:
                self._pending[reply.transfer_id] = reply
            if len(self._pending) > MAX_PENDING_REPLIES:
                self._pending.popitem(last=False)

    def send_all(self) -> None:
        """Try to send every pending reply."""
        with self._lock:
            transfer_ids = list(self._pending)
        for transfer_id in transfer_ids:
            self.send(transfer_id)

    def send(self, transfer_id: bytes) -> None:
        """Send what is pending for a transfer. The thread that is sending already takes a later reply too."""
        is_taken = True
        while is_taken:
            with self._lock:
                if transfer_id in self._sending or transfer_id not in self._pending:
                    return
                reply = self._pending.pop(transfer_id)
                self._sending.add(transfer_id)
            try:
                is_taken = self._send(reply)
            finally:
                with self._lock:
                    self._sending.discard(transfer_id)
            if not is_taken:
                self.put(reply)

    def _send(self, reply: Reply[Connection]) -> bool:
        """Write a HAVE on the first connection that takes it at once, a final reply on all of them.

        Returns:
            False if connections are left and none has taken the reply.
        """
        is_final = reply.frame is not None
        current = reply if is_final else self._latest_have(reply.transfer_id)
        if current is None:
            return True
        if current.frame is None:
            return not current.connections
        is_taken = is_busy = False
        for connection in current.connections:
            with contextlib.suppress(OSError):
                if connection.write_at_once(current.frame):
                    is_taken = True
                    if not is_final:
                        break
                else:
                    is_busy = True
        return is_taken or not is_busy
