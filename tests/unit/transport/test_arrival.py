"""One transfer that arrives: over which connections it is answered, and when it is late."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from prfaas.transport.events import EventQueue
from prfaas.transport.net.connection import Connection
from prfaas.transport.protocol.messages import MAX_SLABS, ObjectSizes
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.receiver.admission import Admission
from prfaas.transport.receiver.api import OpenRequest
from prfaas.transport.receiver.assembler import Assembler
from prfaas.transport.receiver.transfer import Arrival, have_of

DEADLINE, GONE_SECONDS, CALL_SECONDS = 100.0, 10.0, 2.5


@pytest.fixture
def connections() -> Iterator[list[Connection]]:
    """Two."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(Connection(its, state="receiving"))) for its in socket.socketpair()
        ]


@pytest.fixture
def arrival(connections: list[Connection]) -> Arrival:
    """Opened over the first, and then over the second."""
    request = OpenRequest(bytes(16), "peer", b"", ObjectSizes.of([1]), DEADLINE)
    pieces = Admission().admit(request)
    made = Arrival(request, DEADLINE, EventQueue(lambda answer: None), pieces, {connections[0]: None})
    made.opened_over(connections[1])
    return made


def test_answers_go_over_the_connection_that_opened_it_last(arrival: Arrival, connections: list[Connection]) -> None:
    assert arrival.latest_first == connections[::-1]
    arrival.opened_over(connections[0])
    assert arrival.latest_first == connections


def test_a_sender_without_a_connection_is_gone_after_its_time_unless_it_opens_it_again(
    arrival: Arrival, connections: list[Connection]
) -> None:
    arrival.lost(connections[0], now=0.0)
    assert arrival.lateness(50.0, reconnect_seconds=GONE_SECONDS) is None, "the other is there"
    arrival.lost(connections[1], now=50.0)
    arrival.lost(connections[1], now=55.0)  # which it has lost already
    assert arrival.lateness(59.9, reconnect_seconds=GONE_SECONDS) is None
    assert arrival.lateness(60.0, reconnect_seconds=GONE_SECONDS) == "unreachable"
    arrival.opened_over(connections[0])
    assert arrival.lateness(60.0, reconnect_seconds=GONE_SECONDS) is None


def test_after_its_deadline_it_is_late_unless_it_has_ended(arrival: Arrival) -> None:
    assert arrival.lateness(DEADLINE, reconnect_seconds=GONE_SECONDS) == "deadline"
    arrival.ended_at = DEADLINE - 1
    assert arrival.lateness(DEADLINE, reconnect_seconds=GONE_SECONDS) is None


def test_its_sender_is_asked_for_it_each_time_that_it_has_been_alone_for_so_long(
    arrival: Arrival, connections: list[Connection]
) -> None:
    assert not arrival.is_called_for(50.0, each_seconds=CALL_SECONDS)
    for connection in connections:
        arrival.lost(connection, now=10.0)
    called_at = []
    for tick in range(40):
        if arrival.is_called_for(10.0 + tick / 4, each_seconds=CALL_SECONDS):
            called_at.append(10.0 + tick / 4)
            arrival.num_calls += 1
    assert called_at == [12.5, 15.0, 17.5]
    arrival.ended_at = 20.0
    assert not arrival.is_called_for(50.0, each_seconds=CALL_SECONDS)


def test_a_have_names_no_more_slabs_than_a_frame_has() -> None:
    assembler = Assembler(ObjectSizes([(1, 3 * MAX_SLABS)]), Ranges([(0, 1)]))
    for number in range(MAX_SLABS + 10):
        assembler.landed(Slab(2 * number + 1, 1, 0, 1))
    have = have_of(assembler)
    assert have.held.to_list() == [(0, 1)]
    assert have.arrived == tuple(Slab(2 * number + 1, 1, 0, 1) for number in range(MAX_SLABS))
