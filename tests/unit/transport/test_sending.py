"""One transfer that leaves: what of it leaves when, and how long its sender waits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prfaas.transport.protocol.messages import MAX_BODY_BYTES, Have, ObjectSizes, decode_open
from prfaas.transport.protocol.wire import HEADER_BYTES, Header
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.sender.api import SendRequest
from prfaas.transport.sender.outbound_transfer import (
    MAX_CUTS,
    MIN_DEADLINE_SECONDS,
    SLOW_BYTES_PER_SECOND,
    OutboundTransfer,
    PeerState,
    sizes_of,
)
from prfaas.types import FailureReason

NUM_OBJECTS, OBJECT_BYTES = 6, 100
SIZES = ObjectSizes([(OBJECT_BYTES, NUM_OBJECTS)])
DEADLINE_SECONDS = 60.0
ALL = Slab(0, NUM_OBJECTS, 0, OBJECT_BYTES)


def _outgoing(*, body: bytes = b"", sizes: Sequence[int] = SIZES) -> SendRequest:
    return SendRequest(bytes(16), body, sizes, lambda index: memoryview(bytes(OBJECT_BYTES)), 0, DEADLINE_SECONDS)


def _sending(*, body: bytes = b"", sizes: ObjectSizes = SIZES, opened_at: float = 0.0) -> OutboundTransfer:
    return OutboundTransfer(_outgoing(body=body, sizes=sizes), sizes, opened_at)


def _accepted(held: Ranges, *arrived: Slab) -> OutboundTransfer:
    its = _sending()
    its.accepted(PeerState.of(Have(held, arrived), SIZES))
    return its


def test_of_what_is_ready_that_leaves_which_the_peer_neither_holds_nor_has_received() -> None:
    its = _accepted(Ranges([(0, 2)]), Slab(2, 1, 0, 30))
    assert list(its.take_up(Slab(1, 3, 0, OBJECT_BYTES))) == [Slab(3, 1, 0, 30), Slab(2, 2, 30, 70)]
    assert its.unready_bytes == 2 * OBJECT_BYTES, "of the four that must travel two are ready"


def test_what_is_ready_already_is_not_ready_anew() -> None:
    its = _sending()
    assert its.make_ready(Slab(0, 2, 0, 60)) == [Slab(0, 2, 0, 60)]
    assert its.make_ready(Slab(0, 2, 0, OBJECT_BYTES)) == [Slab(0, 2, 60, 40)]


def test_the_next_word_is_the_peers_until_it_has_answered_and_once_it_has_all() -> None:
    its = _sending()
    seen = [(its.awaits_answer, its.is_owed)]
    its.accepted(PeerState.of(Have(Ranges([(1, NUM_OBJECTS)]), ()), SIZES))
    seen.append((its.awaits_answer, its.is_owed))  # nothing is ready
    list(its.take_up(ALL))
    seen.append((its.awaits_answer, its.is_owed))
    its.acked.add(Slab(0, 1, 0, OBJECT_BYTES))
    seen.append((its.awaits_answer, its.is_owed))
    assert seen == [(True, True), (False, False), (False, True), (True, True)]


def test_cuts_are_counted_until_the_peer_answers_anew() -> None:
    sizes = ObjectSizes([(1, 2 * MAX_CUTS)])
    its = _sending(sizes=sizes)
    standing = PeerState.of(Have(Ranges([(1, 2)]), ()), sizes)
    its.accepted(standing)
    assert its.cut([Slab(0, 3, 0, 1)] * MAX_CUTS)
    assert not its.cut([Slab(0, 3, 0, 1)])
    its.accepted(standing)
    assert its.cut([Slab(0, 3, 0, 1)])
    assert its.cut([Slab(1, 2, 0, 1)] * 2 * MAX_CUTS), "what is held at an end makes a slab shorter"


@pytest.mark.parametrize(
    ("opened_at", "now", "reason"),
    [(0.0, 59.9, "unreachable"), (10.1, 59.9, None), (0.0, 60.0, "deadline"), (10.1, 70.1, "deadline")],
)
def test_it_is_late_by_its_deadline_or_with_a_peer_that_is_gone(
    opened_at: float, now: float, reason: FailureReason | None
) -> None:
    its = _sending(opened_at=opened_at)
    assert its.lateness(now, unreachable_before=10.0) == reason
    its.ended_at = now
    assert its.lateness(now, unreachable_before=10.0) is None


def test_a_long_open_has_longer_and_what_is_still_leaving_is_not_waited_for() -> None:
    its = _sending(body=bytes(int(3 * SLOW_BYTES_PER_SECOND)))
    asked = [now for now in range(20) if its.is_to_repeat(now, is_said=now >= 2, patience_seconds=1.0)]
    assert asked == [7, 17], "more than 4 s after it has left, and then than 8 s"


@pytest.mark.parametrize(("now", "left"), [(10.0, 50.0), (60.5, MIN_DEADLINE_SECONDS)])
def test_an_open_names_the_time_that_is_left(now: float, left: float) -> None:
    frame = _sending(body=b"body").open_frame(now)
    opened = decode_open(Header.decode(frame[:HEADER_BYTES]), bytearray(frame[HEADER_BYTES:]))
    assert (opened.deadline_seconds, opened.body, opened.sizes.runs) == (left, b"body", SIZES.runs)


def test_what_the_wire_cannot_carry_is_said_before_it_is_tried() -> None:
    assert sizes_of(_outgoing()) == (SIZES, "")
    assert sizes_of(_outgoing(body=bytes(MAX_BODY_BYTES + 1)))[1] == "its OPEN is longer than the wire allows"
    assert sizes_of(_outgoing(sizes=[1, 0]))[1] == "an object of no bytes, or of too many"
