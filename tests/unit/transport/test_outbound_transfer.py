"""One outbound transfer: which bytes leave, what a HAVE changes, and how long its sender waits."""

from collections.abc import Sequence

import pytest

from prfaas.errors import RemoteProtocolError
from prfaas.transport.protocol.messages import MAX_BODY_BYTES, Have, ObjectSizes, decode_open
from prfaas.transport.protocol.wire import HEADER_BYTES, Header
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.sender.api import SendRequest
from prfaas.transport.sender.outbound_transfer import (
    MAX_GAPS,
    MIN_DEADLINE_SECONDS,
    OutboundTransfer,
    PeerState,
    wire_sizes,
)
from prfaas.types import FailureReason

NUM_OBJECTS, OBJECT_BYTES = 6, 100
SIZES = ObjectSizes([(OBJECT_BYTES, NUM_OBJECTS)])
DEADLINE_SECONDS = 60.0
ALL = Slab(0, NUM_OBJECTS, 0, OBJECT_BYTES)


def _request(*, body: bytes = b"", sizes: Sequence[int] = SIZES) -> SendRequest:
    return SendRequest(bytes(16), body, sizes, lambda index: memoryview(bytes(OBJECT_BYTES)), 0, DEADLINE_SECONDS)


def _transfer(*, body: bytes = b"", sizes: ObjectSizes = SIZES, opened_at: float = 0.0) -> OutboundTransfer:
    return OutboundTransfer(_request(body=body, sizes=sizes), sizes, opened_at)


def test_ready_bytes_leave_unless_the_peer_holds_or_has_received_them() -> None:
    transfer = _transfer()
    transfer.accept(PeerState.of(Have(Ranges([(0, 2)]), (Slab(2, 1, 0, 30),)), SIZES))
    assert list(transfer.parts_to_send(Slab(1, 3, 0, OBJECT_BYTES))) == [Slab(3, 1, 0, 30), Slab(2, 2, 30, 70)]
    assert transfer.unready_bytes == 2 * OBJECT_BYTES, "of four missing objects two are ready"


def test_peer_must_answer_the_open_and_again_once_it_has_everything() -> None:
    transfer = _transfer()
    seen = [(transfer.awaits_answer, transfer.awaits_peer)]
    transfer.accept(PeerState.of(Have(Ranges([(1, NUM_OBJECTS)]), ()), SIZES))
    seen.append((transfer.awaits_answer, transfer.awaits_peer))
    list(transfer.parts_to_send(ALL))
    seen.append((transfer.awaits_answer, transfer.awaits_peer))
    transfer.acked.add(Slab(0, 1, 0, OBJECT_BYTES))
    seen.append((transfer.awaits_answer, transfer.awaits_peer))
    assert seen == [(True, True), (False, False), (False, True), (True, True)]


@pytest.mark.parametrize(
    ("opened_at", "now", "reason"),
    [(0.0, 59.9, "unreachable"), (10.1, 59.9, None), (0.0, 60.0, "deadline"), (10.1, 70.1, "deadline")],
)
def test_transfer_ends_at_its_deadline_or_with_an_unreachable_peer(
    opened_at: float, now: float, reason: FailureReason | None
) -> None:
    transfer = _transfer(opened_at=opened_at)
    assert transfer.lateness(now, unreachable_before=10.0) == reason
    transfer.ended_at = now
    assert transfer.lateness(now, unreachable_before=10.0) is None


@pytest.mark.parametrize(("now", "remaining"), [(10.0, 50.0), (60.5, MIN_DEADLINE_SECONDS)])
def test_open_states_the_remaining_time(now: float, remaining: float) -> None:
    frame = _transfer(body=b"body").open_frame(now)
    opened = decode_open(Header.decode(frame[:HEADER_BYTES]), bytearray(frame[HEADER_BYTES:]))
    assert (opened.deadline_seconds, opened.body, opened.sizes.runs) == (remaining, b"body", SIZES.runs)


def test_request_that_the_wire_cannot_carry_is_rejected() -> None:
    assert wire_sizes(_request()) == (SIZES, "")
    assert "OPEN" in wire_sizes(_request(body=bytes(MAX_BODY_BYTES + 1)))[1]
    assert "object" in wire_sizes(_request(sizes=[1, 0]))[1]


def test_have_with_many_held_objects_drops_some_arrived_slabs() -> None:
    num_held, slabs = 1000, tuple(Slab(0, 1, 2 * at, 1) for at in range(1000))
    sizes = ObjectSizes([(2000, 2 * num_held + 1)])
    held = Ranges((1 + 2 * at, 2 + 2 * at) for at in range(num_held))
    peer_state = PeerState.of(Have(held, slabs), sizes)
    assert tuple(peer_state.arrived.slabs()) == slabs[: MAX_GAPS // (num_held + 1)]
    assert peer_state.missing_bytes == 2000 * (num_held + 1)


@pytest.mark.parametrize("have", [Have(Ranges([(0, 2)]), ()), Have(Ranges(), (Slab(0, 1, 50, 51),))])
def test_have_of_objects_that_do_not_exist_violates_the_protocol(have: Have) -> None:
    with pytest.raises(RemoteProtocolError) as refused:
        PeerState.of(have, ObjectSizes([(100, 1)]))
    assert refused.value.reason == "range"
