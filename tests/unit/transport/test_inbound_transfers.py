"""Inbound transfers without sockets: connections are strings, and the test passes the time."""

import itertools
import os
from collections import Counter

import pytest

from prfaas.errors import RemoteProtocolError
from prfaas.transport.protocol.messages import MAX_SLABS, EndReason, ObjectSizes, decode_ending
from prfaas.transport.protocol.wire import HEADER_BYTES, FrameType, Header
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.receiver.admission import FAIR_FRAGMENTS
from prfaas.transport.receiver.api import (
    Acceptance,
    OpenRequest,
    ReceiveCompleted,
    ReceiveFailed,
    ReceiveMemoryFree,
    Rejection,
)
from prfaas.transport.receiver.assembler import MAX_CORRUPT_CHUNKS, MAX_FRAGMENTS, Assembler
from prfaas.transport.receiver.transfers import (
    HAVE_SECONDS,
    REOPEN_CONNECTIONS,
    REOPEN_RATIO,
    STUCK_WRITE_SECONDS,
    ChunkOutcome,
    InboundTransfer,
    InboundTransfers,
)

DEADLINE_SECONDS, SILENCE_SECONDS = 100.0, 10.0
WHOLE = Slab(0, 1, 0, 100)
GIVEN_UP = EndReason("cancelled", "never opened")


class Receiver:
    """Inbound transfers whose caller accepts everything."""

    def __init__(self, **settings: int) -> None:
        self.transfers: InboundTransfers[str] = InboundTransfers(silence_seconds=SILENCE_SECONDS, **settings)
        self.now = 0.0

    def request(self, *sizes: tuple[int, int], peer: str = "peer") -> OpenRequest:
        return OpenRequest(os.urandom(16), peer, b"", ObjectSizes(sizes or [(100, 1)]), DEADLINE_SECONDS)

    def offer(self, connection: str, *sizes: tuple[int, int]) -> InboundTransfer[str]:
        """Open a transfer that waits for a decision."""
        transfer = self.transfers.open(connection, self.request(*sizes), now=self.now)
        assert transfer is not None
        return transfer

    def open(self, connection: str, *sizes: tuple[int, int]) -> InboundTransfer[str]:
        transfer = self.offer(connection, *sizes)
        self.accept(transfer)
        return transfer

    def accept(self, transfer: InboundTransfer[str], held: Ranges | None = None) -> None:
        assembler = Assembler(transfer.request.object_bytes, held or Ranges())
        self.transfers.accept(transfer, Acceptance((), lambda index: memoryview(b"")), assembler, now=self.now)

    def begin(self, connection: str, transfer: InboundTransfer[str], slab: Slab) -> Header:
        """Begin to write a chunk that is wanted, and return its header."""
        transfer_id = transfer.request.transfer_id
        header = Header(FrameType.CHUNK, slab.num_bytes, transfer_id, slab.first, slab.offset, count=slab.num_objects)
        assert self.transfers.on_chunk_header(connection, "peer", header, wire_bytes=header.length) is transfer
        assert transfer.begin_write(connection, slab)
        return header

    def end(self, connection: str, header: Header, outcome: ChunkOutcome = "complete") -> bool:
        return self.transfers.end_write(connection, header, outcome, now=self.now)

    def write(self, connection: str, transfer: InboundTransfer[str], slab: Slab = WHOLE) -> None:
        self.end(connection, self.begin(connection, transfer, slab))

    def final_frames(self, transfer: InboundTransfer[str]) -> list[FrameType]:
        """Return the types of the final replies that are queued for a transfer."""
        frames = [reply.frame for reply in self.transfers.replies if reply.transfer_id == transfer.request.transfer_id]
        return [Header.decode(frame[:HEADER_BYTES]).type for frame in frames if frame is not None]

    @property
    def num_fragments(self) -> int:
        return sum(transfer.fragments.count for transfer in self.transfers._transfers.values())


@pytest.fixture
def receiver() -> Receiver:
    return Receiver(max_fragments=16 * FAIR_FRAGMENTS)


def test_a_transfer_completes_with_its_last_byte_and_frees_its_memory(receiver: Receiver) -> None:
    transfer = receiver.open("a")
    receiver.write("a", transfer, Slab(0, 1, 0, 60))
    assert receiver.final_frames(transfer) == []
    receiver.write("b", transfer, Slab(0, 1, 60, 40))
    assert receiver.final_frames(transfer) == [FrameType.DONE]
    assert receiver.transfers.replies[-1].connections == ("a", "b")
    assert [type(event) for event in receiver.transfers.events] == [ReceiveCompleted, ReceiveMemoryFree]


def test_transfer_that_is_held_entirely_is_answered_with_have_and_done(receiver: Receiver) -> None:
    transfer = receiver.offer("a")
    receiver.accept(transfer, held=Ranges([(0, 1)]))
    (reply,) = receiver.transfers.replies
    assert reply.frame is not None
    have = Header.decode(reply.frame[:HEADER_BYTES])
    done = Header.decode(reply.frame[HEADER_BYTES + have.length :][:HEADER_BYTES])
    assert (have.type, done.type) == (FrameType.HAVE, FrameType.DONE)


def test_memory_of_an_ended_transfer_is_free_once_its_last_writer_has_left(receiver: Receiver) -> None:
    transfer = receiver.open("a")
    header = receiver.begin("a", transfer, WHOLE)
    receiver.transfers.cancel(transfer.request.transfer_id, "cancelled", "not wanted", now=0.0)
    assert receiver.transfers.events == [], "the caller knows"
    assert receiver.transfers.tick(STUCK_WRITE_SECONDS, heard_at={}).aborts == []
    assert receiver.transfers.tick(STUCK_WRITE_SECONDS + 0.1, heard_at={}).aborts == ["a"]
    receiver.end("a", header, "lost")
    assert receiver.transfers.events == [ReceiveMemoryFree(transfer.request.transfer_id)]


@pytest.mark.parametrize("is_accepted", [True, False])
def test_a_transfer_that_ends_before_the_decision_sends_one_error(receiver: Receiver, is_accepted: bool) -> None:
    transfer = receiver.offer("a")
    receiver.transfers.cancelled("a", "peer", transfer.request.transfer_id, GIVEN_UP, now=0.0)
    if is_accepted:
        receiver.accept(transfer)
    else:
        receiver.transfers.reject(transfer, Rejection("no_memory", "too late"))
    assert receiver.final_frames(transfer) == [FrameType.ERROR]
    kinds = [type(event) for event in receiver.transfers.events]
    assert kinds == ([ReceiveFailed, ReceiveMemoryFree] if is_accepted else [ReceiveFailed])


def test_a_sender_that_counts_other_bytes_fails_its_transfer_once(receiver: Receiver) -> None:
    transfer = receiver.open("a")
    receiver.begin("a", transfer, WHOLE)
    for total_bytes in (100, 99, 99):
        end = Header(FrameType.END, 0, transfer.request.transfer_id, offset=total_bytes)
        receiver.transfers.all_sent("peer", end, now=0.0)
        receiver.transfers.all_sent("thief", end, now=0.0)
    [failed] = receiver.transfers.events
    assert isinstance(failed, ReceiveFailed) and failed.reason == "protocol"


def test_a_repeated_open_is_answered_with_have_at_once_or_at_a_later_tick(receiver: Receiver) -> None:
    transfer = receiver.open("a")
    receiver.now = 1.0
    for _ in range(3):
        assert receiver.transfers.open("b", transfer.request, now=receiver.now) is None
    receiver.now += HAVE_SECONDS
    receiver.transfers.open("b", transfer.request, now=receiver.now)
    assert [reply.is_delayed for reply in receiver.transfers.replies] == [False, False, True, True, False]


def test_replies_try_the_connection_first_that_opened_the_transfer_last(receiver: Receiver) -> None:
    transfer = receiver.open("a")
    for connection in ("b", "a"):
        transfer.opened_over(connection)
        assert transfer.latest_first[0] == connection


def test_a_sender_without_connections_is_gone_after_a_while_unless_it_opens_the_transfer_again(
    receiver: Receiver,
) -> None:
    transfer = receiver.open("a")
    transfer.opened_over("b")
    for now, connection in ((0.0, "a"), (50.0, "b"), (55.0, "b")):
        assert transfer.overdue_reason(now, silence_seconds=SILENCE_SECONDS, heard_at=60.0) is None
        transfer.connection_lost(connection, now=now)
    assert transfer.overdue_reason(59.9, silence_seconds=SILENCE_SECONDS, heard_at=60.0) is None
    assert transfer.overdue_reason(60.0, silence_seconds=SILENCE_SECONDS, heard_at=60.0) == "unreachable"
    transfer.opened_over("a")
    assert transfer.overdue_reason(60.0, silence_seconds=SILENCE_SECONDS, heard_at=60.0) is None


def test_transfer_of_a_silent_peer_fails_while_its_connections_stay(receiver: Receiver) -> None:
    receiver.transfers.connected("a", "peer", has_heartbeats=True)
    receiver.open("a")
    assert receiver.transfers.awaited_connections() == {"peer": ["a"]}
    receiver.transfers.tick(20.0, heard_at={"peer": 20.1 - SILENCE_SECONDS})
    assert not receiver.transfers.events
    receiver.transfers.tick(20.0, heard_at={"peer": 20.0 - SILENCE_SECONDS})
    assert [event.reason for event in receiver.transfers.events if isinstance(event, ReceiveFailed)] == ["unreachable"]
    assert receiver.transfers.awaited_connections() == {}


def test_peer_without_heartbeats_on_a_connection_is_not_judged(receiver: Receiver) -> None:
    receiver.transfers.connected("a", "peer", has_heartbeats=True)
    receiver.transfers.connected("b", "peer", has_heartbeats=False)
    receiver.open("a")
    assert receiver.transfers.awaited_connections() == {}


def test_an_active_transfer_fails_at_its_deadline(receiver: Receiver) -> None:
    transfer = receiver.open("a")
    receiver.transfers.tick(DEADLINE_SECONDS - 0.1, heard_at={})
    assert receiver.transfers.events == []
    for _ in range(2):
        receiver.transfers.tick(DEADLINE_SECONDS, heard_at={})
    failed, freed = receiver.transfers.events
    assert isinstance(failed, ReceiveFailed) and failed.reason == "deadline"
    assert freed == ReceiveMemoryFree(transfer.request.transfer_id)


def test_reopen_goes_over_a_few_other_connections_after_each_interval(receiver: Receiver) -> None:
    transfers = [receiver.open("a") for _ in range(5)]
    others = [str(number) for number in range(3 * REOPEN_CONNECTIONS)]
    for connection in others:
        receiver.transfers.connected(connection, "peer", has_heartbeats=True)
    receiver.transfers.connected("a", "peer", has_heartbeats=True)
    receiver.transfers.disconnected("a", "peer", now=10.0)
    sent: Counter[tuple[str, bytes]] = Counter()
    for tick in range(39):
        sent.update(receiver.transfers.tick(10.0 + tick / 4, heard_at={}).reopens)
        num_intervals = int(tick / 4 / (REOPEN_RATIO * SILENCE_SECONDS))
        assert sent.total() == num_intervals * REOPEN_CONNECTIONS * len(transfers)
    frames = [Header(FrameType.REOPEN, 0, transfer.request.transfer_id).encode() for transfer in transfers]
    assert sent == {(connection, frame): 1 for connection in others for frame in frames}


def test_a_have_lists_no_more_slabs_than_fit_its_frame(receiver: Receiver) -> None:
    transfer = receiver.offer("a", (1, 3 * MAX_SLABS))
    receiver.accept(transfer, held=Ranges([(0, 1)]))
    assert transfer.assembler is not None
    slabs = [Slab(2 * number + 1, 1, 0, 1) for number in range(MAX_SLABS + 10)]
    for slab in slabs:
        transfer.assembler.arrived.add(slab)
    have = transfer.have()
    assert have is not None and have.held.to_list() == [(0, 1)] and have.arrived == tuple(slabs[:MAX_SLABS])


@pytest.mark.parametrize("fate", ["never opened", "disconnected", "cancelled here", "complete"])
def test_a_cancel_is_answered_on_the_connection_that_brought_it(receiver: Receiver, fate: str) -> None:
    transfer = receiver.open("a")
    transfer_id = os.urandom(16) if fate == "never opened" else transfer.request.transfer_id
    if fate == "disconnected":
        receiver.transfers.connected("a", "peer", has_heartbeats=True)
        receiver.transfers.disconnected("a", "peer", now=0.0)
    elif fate == "cancelled here":
        receiver.transfers.cancel(transfer_id, "cancelled", "not wanted", now=0.0)
    elif fate == "complete":
        receiver.write("a", transfer)
    answer = receiver.transfers.cancelled("b", "peer", transfer_id, GIVEN_UP, now=0.0)
    if fate == "disconnected":
        assert "b" in receiver.transfers.replies[-1].connections
        answer = receiver.transfers.replies[-1].frame
    assert answer is not None
    assert Header.decode(answer[:HEADER_BYTES]).type is (FrameType.DONE if fate == "complete" else FrameType.ERROR)


def test_a_cancel_that_overtakes_its_open_refuses_the_open(receiver: Receiver) -> None:
    request, ending = receiver.request(), EndReason("cancelled", "\N{SNOWMAN}" * 500)
    answer = receiver.transfers.cancelled("a", "peer", request.transfer_id, ending, now=0.0)
    assert answer is not None and receiver.transfers.refusal(request) == answer
    kept = decode_ending(answer[HEADER_BYTES:])
    assert kept == EndReason("cancelled", "\N{SNOWMAN}" * 33), "a character has three bytes"
    [failed] = receiver.transfers.events
    assert isinstance(failed, ReceiveFailed) and failed.message == kept.message


def test_chunks_that_split_the_arrived_area_at_once_stay_within_the_bound(receiver: Receiver) -> None:
    """Each transfer has one column with every second object; a chunk inside that column makes three of it."""
    connections = [str(number) for number in range(6)]
    transfers = [receiver.open(connection, (100, 4 * FAIR_FRAGMENTS)) for connection in connections]
    for connection, transfer in zip(connections, transfers, strict=True):
        for first in range(0, 2 * FAIR_FRAGMENTS, 2):
            receiver.write(connection, transfer, Slab(first, 1, 0, 90))
    assert receiver.num_fragments == 6 * FAIR_FRAGMENTS, "half of this peer's share; each transfer would add a sixth"
    begun = [
        (connection, receiver.begin(connection, transfer, Slab(0, 2, 10, 20)))
        for connection, transfer in zip(connections, transfers, strict=True)
    ]
    outcomes: list[ChunkOutcome] = ["complete", "lost", "corrupt"]
    for (connection, header), outcome in zip(begun, itertools.cycle(outcomes), strict=False):
        receiver.end(connection, header, outcome)
        assert receiver.num_fragments <= 12 * FAIR_FRAGMENTS


@pytest.mark.parametrize("outcome", ["complete", "lost", "corrupt"])
def test_one_transfer_has_bounded_fragments_however_much_room_there_is(outcome: ChunkOutcome) -> None:
    num_objects, receiver = 2 * MAX_FRAGMENTS, Receiver()
    transfer, firsts = receiver.open("a", (100, num_objects)), iter(range(0, num_objects, 2))
    for first in itertools.islice(firsts, MAX_FRAGMENTS // 3 - 2):
        receiver.write("b", transfer, Slab(first, 1, 0, 90))
    header = receiver.begin("a", transfer, Slab(num_objects - 1, 1, 10, 20))  # Splits every fragment into three.
    for first in itertools.islice(firsts, 10):
        receiver.write("b", transfer, Slab(first, 1, 0, 90))
    with pytest.raises(RemoteProtocolError, match="fragments"):
        receiver.begin("b", transfer, Slab(num_objects - 2, 1, 10, 20))
    receiver.end("a", header, outcome)
    assert receiver.num_fragments <= 1, "everything else must arrive again"


def test_a_transfer_with_many_corrupt_chunks_is_given_up() -> None:
    assembler = Assembler(ObjectSizes([(MAX_CORRUPT_CHUNKS, 1)]), Ranges())
    retries = [assembler.reject(Slab(0, 1, at, 1)) for at in range(MAX_CORRUPT_CHUNKS)]
    assert retries == [True] * (MAX_CORRUPT_CHUNKS - 1) + [False]
