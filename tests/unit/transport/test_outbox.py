"""The transfers that leave over a link: what is asked again when no answer comes."""

from __future__ import annotations

import tracemalloc

import pytest

from prfaas.transport.protocol.messages import MAX_BODY_BYTES, Done, Ending, Have, ObjectSizes, decode_open
from prfaas.transport.protocol.wire import HEADER_BYTES, FrameType, Header
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.sender.api import SendAccepted, SendCompleted, SendEvent, SendFailed, SendMemoryFree, SendRequest
from prfaas.transport.sender.outbound_transfer import MAX_CUTS, SLOW_BYTES_PER_SECOND, PeerState
from prfaas.transport.sender.outbox import MAX_ENDS, Outbox

ID = bytes(range(16))
PATIENCE = 1.0
WHOLE = Slab(0, 1, 0, 100)
SIZES = ObjectSizes([(100, 1)])


class _Sender:
    """An outbox with one transfer of a hundred bytes, all of them ready, whose OPEN has left."""

    def __init__(self, *, body: bytes = b"") -> None:
        self.events: list[SendEvent] = []
        self.outbox = Outbox(self.events.append, num_connections=1)
        self.outbox.open(SendRequest(ID, body, [100], lambda index: memoryview(bytes(100)), 0, 3600.0), now=0.0)
        self.outbox.ready(ID, WHOLE, now=0.0)
        assert self.said() == [FrameType.OPEN]

    def said(self) -> list[FrameType]:
        frames = iter(lambda: self.outbox.next_frame(now=0.0), None)
        headers = [(transfer_id, Header.decode(frame[:HEADER_BYTES])) for transfer_id, frame in frames]
        assert all(its.transfer_id == transfer_id for transfer_id, its in headers)
        return [its.type for _, its in headers]

    def after(self, seconds: float, *, leaving: frozenset[bytes] = frozenset()) -> list[FrameType]:
        """What leaves when the clock stands there."""
        is_any = self.outbox.ask_again(now=seconds, patience_seconds=PATIENCE, leaving=leaving)
        said = self.said()
        assert is_any == bool(said)
        return said

    def hear_have(self, *arrived: Slab) -> None:
        self.outbox.have(ID, PeerState.of(Have(Ranges(), arrived), SIZES), process=bytes(16), now=0.0)

    def send_all(self) -> None:
        """Every byte leaves and is acknowledged."""
        while (taken := self.outbox.take()) is not None:
            self.outbox.sent(taken[0])
            self.outbox.landed([taken[0]], time_ns=0)
        self.said()


def test_an_open_that_nobody_answers_is_repeated_and_ever_more_seldom() -> None:
    sender = _Sender()
    asked = [quarter / 4 for quarter in range(40) if sender.after(quarter / 4)]
    assert asked == [1.25, 3.75, 8.25]  # more than 1, 2 and 4 s after the first look


@pytest.mark.parametrize(
    ("whole", "repeated"), [(b"whole", b"whole"), (bytes(MAX_BODY_BYTES + 1), b"brief")], ids=["fits", "too long"]
)
def test_an_open_that_is_repeated_leaves_out_nothing_that_the_wire_can_carry(whole: bytes, repeated: bytes) -> None:
    outbox = Outbox(lambda event: None, num_connections=1)
    source = memoryview(bytes(100))
    outbox.open(SendRequest(ID, b"brief", [100], lambda index: source, 0, 3600.0, whole_body=lambda: whole), now=0.0)
    assert _body_of(outbox.next_frame(now=0.0)) == b"brief"
    outbox.connection_lost(is_last=True)
    assert _body_of(outbox.next_frame(now=0.0)) == repeated


def _body_of(said: tuple[bytes, bytes] | None) -> bytes:
    assert said is not None
    _, frame = said
    return decode_open(Header.decode(frame[:HEADER_BYTES]), frame[HEADER_BYTES:]).body


def test_a_long_open_has_time_to_arrive_before_it_is_repeated() -> None:
    sender = _Sender(body=bytes(int(3 * SLOW_BYTES_PER_SECOND)))
    assert not sender.after(0.0) and not sender.after(3.9)
    assert sender.after(4.1) == [FrameType.OPEN]


def test_an_open_is_not_repeated_while_it_is_still_leaving() -> None:
    sender = _Sender()
    assert not any(sender.after(second, leaving=frozenset({ID})) for second in range(20))
    assert not sender.after(20.0) and not sender.after(20.9)
    assert sender.after(21.1) == [FrameType.OPEN]


def test_an_end_that_got_lost_is_asked_for_once_everything_is_acknowledged() -> None:
    sender = _Sender()
    sender.hear_have()
    sender.send_all()
    assert not sender.after(10.0) and not sender.after(10.9)
    assert sender.after(11.1) == [FrameType.OPEN]
    sender.outbox.done(ID, Done(100, 0), now=11.2)
    assert [type(event) for event in sender.events if isinstance(event, SendCompleted)] == [SendCompleted]


def test_who_was_slow_to_accept_is_asked_for_a_lost_end_as_soon_as_anybody() -> None:
    sender = _Sender()
    assert len([second for second in range(10) if sender.after(second)]) == 2
    sender.hear_have()
    sender.send_all()
    assert not sender.after(20.0) and sender.after(21.1) == [FrameType.OPEN]


def test_bytes_that_were_acknowledged_and_are_missing_leave_again() -> None:
    sender = _Sender()
    sender.hear_have()
    sender.send_all()
    sender.after(10.0)
    assert sender.after(11.1) == [FrameType.OPEN]
    sender.hear_have(Slab(0, 1, 0, 60))
    taken = sender.outbox.take()
    assert taken is not None and taken[0].slab == Slab(0, 1, 60, 40)


def test_nobody_is_asked_while_bytes_are_on_their_way() -> None:
    sender = _Sender()
    sender.hear_have()
    assert not any(sender.after(second) for second in range(100))


@pytest.mark.parametrize("is_ready_first", [False, True])
def test_a_peer_that_holds_objects_too_scattered_ends_the_transfer_and_its_queue_takes_no_memory(
    *, is_ready_first: bool
) -> None:
    """Two million pieces: each layer would leave object by object."""
    num_objects, num_layers, events = 1 << 16, 61, list[SendEvent]()
    outbox = Outbox(events.append, num_connections=1)
    sizes = ObjectSizes([(num_layers, num_objects)])
    outbox.open(SendRequest(ID, b"", sizes, lambda index: memoryview(bytes(num_layers)), 0, 3600.0), now=0.0)
    standing = PeerState.of(Have(Ranges((at, at + 1) for at in range(0, num_objects, 2)), ()), sizes)
    layers = [Slab(0, num_objects, layer, 1) for layer in range(num_layers)]

    def become_ready() -> None:
        for slab in layers:
            outbox.ready(ID, slab, now=0.0)

    tracemalloc.start()
    if is_ready_first:
        become_ready()
    outbox.have(ID, standing, process=bytes(16), now=0.0)
    if not is_ready_first:
        become_ready()
    grown = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert grown < 300 * MAX_CUTS
    assert [type(event) for event in events] == [SendAccepted, SendFailed, SendMemoryFree]
    assert isinstance(events[1], SendFailed) and events[1].reason == "protocol"
    assert outbox.has_work() and outbox.queued_bytes == 0, "the peer hears of it"


def test_a_peer_may_hold_as_scattered_objects_as_any_keeps_pieces() -> None:
    num_held, num_layers = 250, 61
    outbox = Outbox(lambda event: None, num_connections=1)
    sizes = ObjectSizes([(num_layers, 2 * num_held)])
    outbox.open(SendRequest(ID, b"", sizes, lambda index: memoryview(bytes(num_layers)), 0, 3600.0), now=0.0)
    standing = PeerState.of(Have(Ranges((at, at + 1) for at in range(0, 2 * num_held, 2)), ()), sizes)
    for layer in range(num_layers):
        outbox.ready(ID, Slab(0, 2 * num_held, layer, 1), now=0.0)
    for _ in range(5):  # each HAVE counts anew
        outbox.have(ID, standing, process=bytes(16), now=0.0)
        outbox.reopen(ID)
    outbox.have(ID, standing, process=bytes(16), now=0.0)
    assert outbox.queued_bytes == num_held * num_layers


@pytest.mark.parametrize("is_whole", [True, False], ids=["wholly held", "held at both ends"])
def test_a_long_prompt_of_which_the_peer_holds_the_beginning_is_cut_by_nothing(*, is_whole: bool) -> None:
    """Each step makes a slab for each layer of each rank, however few of their objects leave."""
    num_slabs, events = MAX_CUTS + 1, list[SendEvent]()
    outbox = Outbox(events.append, num_connections=1)
    sizes = ObjectSizes([(1, 3 * num_slabs)])
    outbox.open(SendRequest(ID, b"", sizes, lambda index: memoryview(b"x"), 0, 3600.0), now=0.0)
    ends = (its for first in range(0, 3 * num_slabs, 3) for its in ((first, first + 1), (first + 2, first + 3)))
    held = Ranges([(0, 3 * num_slabs)] if is_whole else ends)
    outbox.have(ID, PeerState.of(Have(held, ()), sizes), process=bytes(16), now=0.0)
    for at in range(num_slabs):
        outbox.ready(ID, Slab(3 * at, 3, 0, 1), now=0.0)
    assert [type(event) for event in events] == [SendAccepted]
    assert outbox.queued_bytes == (0 if is_whole else num_slabs)


def test_a_cancel_is_said_again_after_a_loss_until_it_is_answered_or_late() -> None:
    sender, gave_up = _Sender(), Ending("cancelled", "no longer wanted")
    sender.outbox.cancel(ID, gave_up, now=1.0)
    assert sender.said() == [FrameType.CANCEL]
    assert sender.said() == []
    for _ in range(2):
        sender.outbox.connection_lost(is_last=False)
        assert sender.said() == [FrameType.CANCEL]
    sender.outbox.refused(ID, gave_up, now=2.0)
    sender.outbox.connection_lost(is_last=False)
    assert sender.said() == []


@pytest.mark.parametrize("is_said", [False, True])
def test_a_cancel_whose_transfer_is_late_is_not_said_any_more(is_said: bool) -> None:
    sender = _Sender()
    sender.outbox.cancel(ID, Ending("cancelled", "no longer wanted"), now=1.0)
    assert not is_said or sender.said() == [FrameType.CANCEL]
    sender.outbox.late(now=3600.0, unreachable_before=0.0)
    sender.outbox.connection_lost(is_last=False)
    assert sender.said() == []


def test_so_many_ends_wait_for_a_connection_and_of_more_the_oldest_are_not_said() -> None:
    outbox = Outbox(lambda event: None, num_connections=1)
    transfers = [number.to_bytes(16, "big") for number in range(MAX_ENDS + 10)]
    for transfer_id in transfers:
        outbox.open(SendRequest(transfer_id, b"", [1], lambda index: memoryview(b"x"), 0, 3600.0), now=0.0)
        outbox.ready(transfer_id, Slab(0, 1, 0, 1), now=0.0)
        have = PeerState.of(Have(Ranges(), ()), ObjectSizes([(1, 1)]))
        outbox.have(transfer_id, have, process=bytes(16), now=0.0)
        taken = outbox.take()
        assert taken is not None
        outbox.sent(taken[0])
        outbox.done(transfer_id, Done(1, 0), now=0.0)
    said = [Header.decode(frame[:HEADER_BYTES]) for _, frame in iter(lambda: outbox.next_frame(now=0.0), None)]
    assert [its.transfer_id for its in said if its.type is FrameType.END] == transfers[-MAX_ENDS:]
