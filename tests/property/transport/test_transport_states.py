"""State machines of the transport: random events drive the real objects, which follow their transition tables."""

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import LocalProtocolError, RemoteProtocolError
from prfaas.transport.net.connection import Connection
from prfaas.transport.protocol import wire
from prfaas.transport.protocol.messages import EndReason, Have, ObjectSizes, TransferStats
from prfaas.transport.protocol.wire import ConnectionState, ConnectionStep, FrameType, Header
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.receiver import transfers
from prfaas.transport.receiver.api import Acceptance, OpenRequest, Rejection
from prfaas.transport.receiver.assembler import Assembler
from prfaas.transport.receiver.transfers import InboundEvent, InboundState, InboundTransfers
from prfaas.transport.sender import outbound_transfer
from prfaas.transport.sender.api import SendEvent, SendMemoryFree, SendRequest
from prfaas.transport.sender.chunker import Chunk
from prfaas.transport.sender.outbound_transfer import OutboundEvent, OutboundState, PeerState
from prfaas.transport.sender.outbox import Outbox

ConnectionEvent = FrameType | ConnectionStep
CONNECTION_EVENTS: list[ConnectionEvent] = [*FrameType, *ConnectionStep]
CHUNK_TYPES = (FrameType.CHUNK, FrameType.PACKED)


class ConnectionRun:
    """A connection whose peer sends headers of any type."""

    def __init__(self) -> None:
        near, self._far = socket.socketpair()
        self._connection = Connection(near)
        self.transitions: set[tuple[ConnectionState, ConnectionEvent]] = set()

    def apply(self, event: ConnectionEvent) -> None:
        """Apply an event and check that the connection follows the table, or refuses the event and stays."""
        before = self._connection.state
        if before is ConnectionState.CLOSED:
            return
        expected = wire.TRANSITIONS.transitions.get((before, event))
        refusal = RemoteProtocolError if isinstance(event, FrameType) else LocalProtocolError
        with contextlib.nullcontext() if expected else pytest.raises(refusal):
            if isinstance(event, FrameType):
                is_chunk = event in CHUNK_TYPES
                self._far.sendall(Header(event, int(is_chunk), count=int(is_chunk)).encode())
                self._connection.read_header()
            elif event is ConnectionStep.CLOSE:
                self._connection.close()
            else:
                self._connection.advance(event)
        assert self._connection.state is (expected or before)
        if expected:
            self.transitions.add((before, event))

    def close(self) -> None:
        self._connection.close()
        self._far.close()


def _run_connection(events: Iterable[ConnectionEvent]) -> set[tuple[ConnectionState, ConnectionEvent]]:
    with contextlib.closing(ConnectionRun()) as run:
        for event in events:
            run.apply(event)
        return run.transitions


@given(st.lists(st.sampled_from(CONNECTION_EVENTS), max_size=30))
def test_a_connection_makes_only_transitions_of_its_table(events: list[ConnectionEvent]) -> None:
    _run_connection([ConnectionStep.LISTEN, *events])
    _run_connection([ConnectionStep.DIAL, *events])


def test_a_connection_reaches_every_transition_of_its_table() -> None:
    reached = set()
    for path in _paths(wire.TRANSITIONS.initial, wire.TRANSITIONS.transitions):
        reached |= _run_connection(path)
    assert reached == set(wire.TRANSITIONS.transitions)


class InboundRun:
    """One inbound transfer of 100 bytes, which one connection fills."""

    def __init__(self) -> None:
        self._transfers: InboundTransfers[str] = InboundTransfers(silence_seconds=5.0)
        self._request = OpenRequest(bytes(16), "peer", b"", ObjectSizes.of([100]), 100.0)
        transfer = self._transfers.open("a", self._request, now=0.0)
        assert transfer is not None
        self._transfer = transfer
        self._header = Header(FrameType.CHUNK, 100, bytes(16), count=1)
        self._is_decided = False
        self.transitions: set[tuple[InboundState, InboundEvent]] = set()
        self._advance, transfer.advance = transfer.advance, self._record  # type: ignore[method-assign]

    def _record(self, event: InboundEvent) -> None:
        before = self._transfer.state
        self._advance(event)
        assert transfers.TRANSITIONS.transitions[before, event] is self._transfer.state
        self.transitions.add((before, event))

    def apply(self, action: str) -> None:
        """Do what a caller, a sender or the clock may do at any time."""
        transfer, writers = self._transfer, self._transfer.writers
        if action in ("accept", "reject") and not self._is_decided:
            self._is_decided = True
            if action == "accept":
                assembler = Assembler(self._request.object_bytes, Ranges())
                self._transfers.accept(transfer, Acceptance((), lambda index: memoryview(b"")), assembler, now=0.0)
            else:
                self._transfers.reject(transfer, Rejection("no_memory", "full"))
        elif action == "begin" and not writers:
            if self._transfers.on_chunk_header("a", "peer", self._header, wire_bytes=100) is not None:
                assert transfer.begin_write("a", Slab(0, 1, 0, 100))
        elif action in ("complete", "corrupt", "lost") and writers:
            self._transfers.end_write("a", self._header, action, now=0.0)  # type: ignore[arg-type]
        elif action == "cancel":
            self._transfers.cancel(bytes(16), "cancelled", "not wanted", now=0.0)
        elif action == "cancelled":
            self._transfers.cancelled("a", "peer", bytes(16), EndReason("cancelled", "given up"), now=0.0)
        elif action == "wrong end":
            self._transfers.all_sent("peer", Header(FrameType.END, 0, bytes(16), offset=1), now=0.0)
        elif action == "deadline":
            self._transfers.tick(1000.0, heard_at={})
        is_known = self._transfers.get(bytes(16)) is transfer
        assert is_known == (transfer.state is not InboundState.RELEASED)


INBOUND_ACTIONS = (
    "accept",
    "reject",
    "begin",
    "complete",
    "corrupt",
    "lost",
    "cancel",
    "cancelled",
    "wrong end",
    "deadline",
)


def _run_inbound(actions: Iterable[str]) -> set[tuple[InboundState, InboundEvent]]:
    run = InboundRun()
    for action in actions:
        run.apply(action)
    return run.transitions


@given(st.lists(st.sampled_from(INBOUND_ACTIONS), max_size=20))
def test_an_inbound_transfer_makes_only_transitions_of_its_table(actions: list[str]) -> None:
    _run_inbound(actions)


def test_an_inbound_transfer_reaches_every_transition_of_its_table() -> None:
    runs = (
        ["accept", "begin", "complete"],
        ["accept", "begin", "cancelled", "lost"],
        ["deadline", "accept"],
        ["cancel", "reject"],
        ["reject"],
    )
    reached = set().union(*map(_run_inbound, runs))
    assert reached == set(transfers.TRANSITIONS.transitions)


class OutboundRun:
    """One outbound transfer of 100 bytes, all of them ready, in an outbox."""

    def __init__(self) -> None:
        self.outbox = Outbox(self._note_event, num_connections=1)
        self._reading: list[Chunk] = []
        self._is_released = False
        request = SendRequest(bytes(16), b"", [100], lambda index: memoryview(bytes(100)), 0, 100.0)
        self.outbox.open(request, now=0.0)
        self._transfer = transfer = self.outbox._transfers[bytes(16)]
        self.transitions: set[tuple[OutboundState, OutboundEvent]] = set()
        self._advance, transfer.advance = transfer.advance, self._record  # type: ignore[method-assign]
        self.outbox.ready(bytes(16), Slab(0, 1, 0, 100), now=0.0)

    def _note_event(self, event: SendEvent) -> None:
        self._is_released |= isinstance(event, SendMemoryFree)

    def _record(self, event: OutboundEvent) -> None:
        before = self._transfer.state
        self._advance(event)
        assert outbound_transfer.TRANSITIONS.transitions[before, event] is self._transfer.state
        self.transitions.add((before, event))

    def apply(self, action: str) -> None:
        """Do what the agent, a connection, the peer or the clock may do at any time."""
        OUTBOUND_ACTIONS[action](self, self.outbox)
        is_released = self._transfer.state is OutboundState.RELEASED
        assert is_released == self._is_released == (self.outbox.num_transfers == 0)

    def take(self) -> None:
        if (taken := self.outbox.take()) is not None:
            self._reading.append(taken[0])

    def sent(self) -> None:
        if self._reading:
            chunk = self._reading.pop()
            self.outbox.sent(chunk)
            self.outbox.landed([chunk], time_ns=0)

    def drain(self) -> None:
        while self.outbox.next_frame(now=0.0) is not None:
            pass

    def repeat_unanswered(self) -> None:
        for now in (0.0, 1e9):
            self.outbox.repeat_unanswered(now=now, patience_seconds=1.0, leaving=frozenset())


ID = bytes(16)
NOTHING_HELD = PeerState.of(Have(Ranges(), ()), ObjectSizes.of([100]))
OUTBOUND_ACTIONS: dict[str, Callable[[OutboundRun, Outbox], object]] = {
    "have": lambda run, outbox: outbox.have(ID, NOTHING_HELD, now=0.0),
    "take": lambda run, outbox: run.take(),
    "sent": lambda run, outbox: run.sent(),
    "drain": lambda run, outbox: run.drain(),
    "reopen": lambda run, outbox: outbox.reopen(ID),
    "connection lost": lambda run, outbox: outbox.connection_lost(is_last=False),
    "last connection lost": lambda run, outbox: outbox.connection_lost(is_last=True),
    "unanswered": lambda run, outbox: run.repeat_unanswered(),
    "done": lambda run, outbox: outbox.done(ID, TransferStats(100, 0), now=0.0),
    "refused": lambda run, outbox: outbox.refused(ID, EndReason("no_memory", "full"), now=0.0),
    "cancel": lambda run, outbox: outbox.cancel(ID, EndReason("cancelled", "not wanted"), now=0.0),
    "shutdown": lambda run, outbox: outbox.fail_all("shutdown", "stops", now=0.0),
}


def _run_outbound(actions: Iterable[str]) -> set[tuple[OutboundState, OutboundEvent]]:
    run = OutboundRun()
    for action in actions:
        run.apply(action)
    return run.transitions


@given(st.lists(st.sampled_from(list(OUTBOUND_ACTIONS)), max_size=20))
def test_an_outbound_transfer_makes_only_transitions_of_its_table(actions: list[str]) -> None:
    _run_outbound(actions)


def test_an_outbound_transfer_reaches_every_transition_of_its_table() -> None:
    runs = (
        ["drain", "unanswered", "have", "take", "sent", "done"],
        ["have", "take", "reopen", "done", "sent"],
        ["have", "take", "cancel", "sent"],
        ["refused"],
    )
    reached = set().union(*map(_run_outbound, runs))
    assert reached == set(outbound_transfer.TRANSITIONS.transitions)


def _paths(
    initial: ConnectionState, table: Iterable[tuple[ConnectionState, ConnectionEvent]]
) -> Iterator[list[ConnectionEvent]]:
    """Yield for each transition of the table a path from the initial state whose last event makes it."""
    following = wire.TRANSITIONS.transitions
    ways: dict[ConnectionState, list[ConnectionEvent]] = {initial: []}
    pending = [initial]
    for state in pending:
        for source, event in table:
            if source is state and (target := following[state, event]) not in ways:
                ways[target] = [*ways[state], event]
                pending.append(target)
    for source, event in table:
        yield [*ways[source], event]
