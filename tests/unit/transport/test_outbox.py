"""Outbox of a link: repeated OPEN frames, fragmented transfers, CANCEL and END frames."""

import tracemalloc

import pytest

from prfaas.transport.protocol.messages import MAX_CANCELS, EndReason, Have, ObjectSizes, TransferStats
from prfaas.transport.protocol.wire import HEADER_BYTES, FrameType, Header
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.sender import outbound_transfer
from prfaas.transport.sender.api import SendAccepted, SendCompleted, SendEvent, SendFailed, SendMemoryFree, SendRequest
from prfaas.transport.sender.outbound_transfer import MAX_CUTS, SLOW_BYTES_PER_SECOND, PeerState
from prfaas.transport.sender.outbox import MAX_ENDS, Outbox, PendingCancels

ID = bytes(range(16))
PATIENCE_SECONDS = 1.0
SIZES = ObjectSizes([(100, 1)])
GAVE_UP = EndReason("cancelled", "no longer wanted")


class _Sender:
    """Outbox with one transfer of a hundred bytes. All bytes are ready, and OPEN has left."""

    def __init__(self, *, body: bytes = b"") -> None:
        self.events: list[SendEvent] = []
        self.outbox = Outbox(self.events.append, num_connections=1)
        self.outbox.open(SendRequest(ID, body, [100], lambda index: memoryview(bytes(100)), 0, 3600.0), now=0.0)
        self.outbox.ready(ID, Slab(0, 1, 0, 100), now=0.0)
        assert self.frames() == [FrameType.OPEN]

    def frames(self) -> list[FrameType]:
        """Take all waiting control frames."""
        frames = list(iter(lambda: self.outbox.next_frame(now=0.0), None))
        headers = [(transfer_id, Header.decode(frame[:HEADER_BYTES])) for transfer_id, frame in frames]
        assert all(header.transfer_id == transfer_id for transfer_id, header in headers)
        return [header.type for _, header in headers]

    def frames_at(self, now: float, *, leaving: frozenset[bytes] = frozenset()) -> list[FrameType]:
        """Check for unanswered frames at a time, and take all waiting control frames."""
        is_any = self.outbox.repeat_unanswered(now=now, patience_seconds=PATIENCE_SECONDS, leaving=leaving)
        frames = self.frames()
        assert is_any == bool(frames)
        return frames

    def hear_have(self, *arrived: Slab) -> None:
        self.outbox.have(ID, PeerState.of(Have(Ranges(), arrived), SIZES), now=0.0)

    def send_all(self) -> None:
        """Let every byte leave and be acknowledged."""
        while (taken := self.outbox.take()) is not None:
            self.outbox.sent(taken[0])
            self.outbox.landed([taken[0]], time_ns=0)
        self.frames()


def test_unanswered_open_is_repeated_at_growing_intervals() -> None:
    sender = _Sender()
    # More than 1, 2 and 4 seconds after the first check.
    assert [quarter / 4 for quarter in range(40) if sender.frames_at(quarter / 4)] == [1.25, 3.75, 8.25]


def test_long_open_has_time_to_arrive_before_it_is_repeated() -> None:
    sender = _Sender(body=bytes(int(3 * SLOW_BYTES_PER_SECOND)))
    assert not sender.frames_at(0.0) and not sender.frames_at(3.9)
    assert sender.frames_at(4.1) == [FrameType.OPEN]


def test_open_is_not_repeated_while_it_is_still_leaving() -> None:
    sender = _Sender()
    assert not any(sender.frames_at(second, leaving=frozenset({ID})) for second in range(20))
    assert not sender.frames_at(20.0) and not sender.frames_at(20.9)
    assert sender.frames_at(21.1) == [FrameType.OPEN]


@pytest.mark.parametrize("is_slow_to_accept", [False, True])
def test_open_is_repeated_if_done_does_not_come(*, is_slow_to_accept: bool) -> None:
    sender = _Sender()
    if is_slow_to_accept:
        assert len([second for second in range(10) if sender.frames_at(second)]) == 2
    sender.hear_have()
    sender.send_all()
    assert not sender.frames_at(10.0) and not sender.frames_at(10.9)
    assert sender.frames_at(11.1) == [FrameType.OPEN]
    sender.outbox.done(ID, TransferStats(100, 0), now=11.2)
    assert [type(event) for event in sender.events[-2:]] == [SendCompleted, SendMemoryFree]


def test_acknowledged_bytes_that_a_later_have_lacks_leave_again() -> None:
    sender = _Sender()
    sender.hear_have()
    sender.send_all()
    sender.frames_at(10.0)
    assert sender.frames_at(11.1) == [FrameType.OPEN]
    sender.hear_have(Slab(0, 1, 0, 60))
    taken = sender.outbox.take()
    assert taken is not None and taken[0].slab == Slab(0, 1, 60, 40)


def test_open_is_not_repeated_while_bytes_are_under_way() -> None:
    sender = _Sender()
    sender.hear_have()
    assert not any(sender.frames_at(second) for second in range(100))


def _outbox_of(sizes: ObjectSizes) -> tuple[Outbox, list[SendEvent]]:
    events: list[SendEvent] = []
    outbox = Outbox(events.append, num_connections=1)
    outbox.open(SendRequest(ID, b"", sizes, lambda index: memoryview(b""), 0, 3600.0), now=0.0)
    return outbox, events


@pytest.mark.parametrize("is_ready_first", [False, True])
def test_transfer_fails_with_little_memory_if_held_objects_fragment_it_too_much(
    monkeypatch: pytest.MonkeyPatch, *, is_ready_first: bool
) -> None:
    # Each layer would leave object by object, in more than a hundred thousand pieces.
    num_objects, num_layers, max_cuts = 1 << 12, 61, MAX_CUTS // 16
    monkeypatch.setattr(outbound_transfer, "MAX_CUTS", max_cuts)
    sizes = ObjectSizes([(num_layers, num_objects)])
    outbox, events = _outbox_of(sizes)
    peer_state = PeerState.of(Have(Ranges((at, at + 1) for at in range(0, num_objects, 2)), ()), sizes)
    tracemalloc.start()
    for is_ready_step in (is_ready_first, not is_ready_first):
        if is_ready_step:
            for layer in range(num_layers):
                outbox.ready(ID, Slab(0, num_objects, layer, 1), now=0.0)
        else:
            outbox.have(ID, peer_state, now=0.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300 * max_cuts
    assert [type(event) for event in events] == [SendAccepted, SendFailed, SendMemoryFree]
    assert isinstance(events[1], SendFailed) and events[1].reason == "protocol"
    assert outbox.has_work() and outbox.queued_bytes == 0, "only the CANCEL is left to send"


def test_every_have_starts_a_new_count_of_fragments() -> None:
    num_held, num_layers = 250, 61
    sizes = ObjectSizes([(num_layers, 2 * num_held)])
    outbox, _ = _outbox_of(sizes)
    peer_state = PeerState.of(Have(Ranges((at, at + 1) for at in range(0, 2 * num_held, 2)), ()), sizes)
    for layer in range(num_layers):
        outbox.ready(ID, Slab(0, 2 * num_held, layer, 1), now=0.0)
    for _ in range(5):
        outbox.have(ID, peer_state, now=0.0)
        outbox.reopen(ID)
    outbox.have(ID, peer_state, now=0.0)
    assert outbox.queued_bytes == num_held * num_layers


@pytest.mark.parametrize("is_whole", [True, False], ids=["wholly held", "held at both ends"])
def test_slabs_whose_ends_the_peer_holds_are_not_fragmented(monkeypatch: pytest.MonkeyPatch, *, is_whole: bool) -> None:
    monkeypatch.setattr(outbound_transfer, "MAX_CUTS", 1000)
    num_slabs = 1001
    sizes = ObjectSizes([(1, 3 * num_slabs)])
    outbox, events = _outbox_of(sizes)
    ends = (pair for first in range(0, 3 * num_slabs, 3) for pair in ((first, first + 1), (first + 2, first + 3)))
    held = Ranges([(0, 3 * num_slabs)] if is_whole else ends)
    outbox.have(ID, PeerState.of(Have(held, ()), sizes), now=0.0)
    for at in range(num_slabs):
        outbox.ready(ID, Slab(3 * at, 3, 0, 1), now=0.0)
    assert [type(event) for event in events] == [SendAccepted]
    assert outbox.queued_bytes == (0 if is_whole else num_slabs)


def test_cancel_is_repeated_after_each_lost_connection_until_it_is_answered() -> None:
    sender = _Sender()
    sender.outbox.cancel(ID, GAVE_UP, now=1.0)
    assert sender.frames() == [FrameType.CANCEL]
    assert sender.frames() == []
    for _ in range(2):
        sender.outbox.connection_lost(is_last=False)
        assert sender.frames() == [FrameType.CANCEL]
    sender.outbox.refused(ID, GAVE_UP, now=2.0)
    sender.outbox.connection_lost(is_last=False)
    assert sender.frames() == []


@pytest.mark.parametrize("has_left", [False, True])
def test_cancel_is_dropped_at_the_deadline_of_its_transfer(*, has_left: bool) -> None:
    sender = _Sender()
    sender.outbox.cancel(ID, GAVE_UP, now=1.0)
    assert not has_left or sender.frames() == [FrameType.CANCEL]
    sender.outbox.late(now=3600.0, unreachable_before=0.0)
    sender.outbox.connection_lost(is_last=False)
    assert sender.frames() == []


def test_only_the_latest_cancels_are_kept() -> None:
    cancels, transfers = PendingCancels(), [number.to_bytes(16, "big") for number in range(2 * MAX_CANCELS)]
    for transfer_id in transfers[: MAX_CANCELS + 10]:
        cancels.put(transfer_id, b"cancel", deadline=60.0)
        cancels.next_frame()
    for transfer_id in transfers[MAX_CANCELS + 10 :]:
        cancels.put(transfer_id, b"cancel", deadline=60.0)
    cancels.connection_lost()
    assert [cancels.next_frame()[0] for _ in range(MAX_CANCELS)] == transfers[MAX_CANCELS:]
    assert not cancels.has_unsent


def test_only_the_latest_ends_are_kept() -> None:
    outbox = Outbox(lambda event: None, num_connections=1)
    transfers = [number.to_bytes(16, "big") for number in range(MAX_ENDS + 10)]
    peer_state = PeerState.of(Have(Ranges(), ()), ObjectSizes([(1, 1)]))
    for transfer_id in transfers:
        outbox.open(SendRequest(transfer_id, b"", [1], lambda index: memoryview(b"x"), 0, 3600.0), now=0.0)
        outbox.ready(transfer_id, Slab(0, 1, 0, 1), now=0.0)
        outbox.have(transfer_id, peer_state, now=0.0)
        taken = outbox.take()
        assert taken is not None
        outbox.sent(taken[0])
        outbox.done(transfer_id, TransferStats(1, 0), now=0.0)
    headers = [Header.decode(frame[:HEADER_BYTES]) for _, frame in iter(lambda: outbox.next_frame(now=0.0), None)]
    assert [header.transfer_id for header in headers if header.type is FrameType.END] == transfers[-MAX_ENDS:]
