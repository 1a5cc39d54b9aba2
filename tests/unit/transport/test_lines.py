"""The connections that a link has: which of them end, and what they say of the peer together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from prfaas.transport.congestion.stall_detector import GRACE_SECONDS, LASTING_SECONDS, MOVING_SECONDS, STALL_SECONDS
from prfaas.transport.net.sockets import TcpInfo
from prfaas.transport.sender.connection_worker import ConnectionWorker, ConnectionWorkers
from tests.unit.transport.lines import two_lines

FIRST, SECOND = b"f" * 16, b"s" * 16
IDLE = TcpInfo(0.03, 0.03, 0, 0, 1448, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)


@pytest.fixture
def two() -> Iterator[tuple[ConnectionWorker, ConnectionWorker]]:
    with two_lines(generation=1) as made:
        yield made


@pytest.fixture
def lines(two: tuple[ConnectionWorker, ConnectionWorker]) -> ConnectionWorkers:
    """Both of `two`, to the first process."""
    made = ConnectionWorkers()
    made.lead_to(FIRST)
    for line in two:
        made.add(line)
    return made


def test_another_process_ends_the_connections_to_the_earlier_one(
    lines: ConnectionWorkers, two: tuple[ConnectionWorker, ConnectionWorker]
) -> None:
    assert not lines.lead_to(FIRST)
    assert all(its.is_alive and its.generation == lines.generation for its in two)
    assert lines.lead_to(SECOND)
    assert not any(its.is_alive or its.generation == lines.generation for its in two)
    assert lines.process == SECOND


def test_one_that_is_gone_is_none_of_them(
    lines: ConnectionWorkers, two: tuple[ConnectionWorker, ConnectionWorker]
) -> None:
    lines.remove(two[0])
    assert list(lines) == [two[1]] and len(lines) == 1
    assert two[0] not in lines and two[1] in lines


def test_whoever_sends_from_the_memory_of_these_transfers_ends(
    lines: ConnectionWorkers, two: tuple[ConnectionWorker, ConnectionWorker]
) -> None:
    two[0].reads, two[1].reads = b"this", b"another"
    lines.abort_readers({b"this"})
    assert [its.is_alive for its in two] == [False, True]


def test_the_longest_round_trip_counts_of_those_that_were_asked(
    lines: ConnectionWorkers, two: tuple[ConnectionWorker, ConnectionWorker]
) -> None:
    assert lines.rtt_seconds == 0.0
    two[0].seen = IDLE
    assert lines.rtt_seconds == 0.03
    two[1].seen = dataclasses.replace(IDLE, rtt_seconds=0.2)
    assert lines.rtt_seconds == 0.2


def test_a_frame_is_leaving_while_the_peer_takes_what_is_unsent(
    lines: ConnectionWorkers, two: tuple[ConnectionWorker, ConnectionWorker]
) -> None:
    for line, name in zip(two, (b"one", b"other"), strict=True):
        line.says, line.pulse.moved_at = name, 100.0
    two[0].seen = dataclasses.replace(IDLE, unsent_bytes=1)
    assert lines.leaving(100.0 + MOVING_SECONDS) == {b"one"}
    assert lines.leaving(100.1 + MOVING_SECONDS) == set()


def test_a_peer_that_still_takes_bytes_of_a_lasting_connection_is_slow(
    lines: ConnectionWorkers, two: tuple[ConnectionWorker, ConnectionWorker]
) -> None:
    two[1].pulse.began_at, two[1].pulse.moved_at = 100.0, 100.0 + LASTING_SECONDS
    assert lines.is_any_slow(100.0 + LASTING_SECONDS)
    assert not lines.is_any_slow(100.1 + LASTING_SECONDS + MOVING_SECONDS)


def test_one_that_stands_still_while_another_is_answered_is_stalled_until_it_ends(
    lines: ConnectionWorkers, two: tuple[ConnectionWorker, ConnectionWorker]
) -> None:
    still, answered = two
    still.pulse.oldest_at = 1.0
    end = 1.0 + STALL_SECONDS
    assert lines.stalled(end - 0.1) == ([], [])
    stalled, unheard = lines.stalled(end)
    assert not stalled and set(unheard) == set(two), "nobody's answer tells of another"
    answered.pulse.acknowledged(end, end, oldest_at=None, now=end)
    assert lines.stalled(end + 0.5) == ([], [])
    assert lines.stalled(end + 0.5 + GRACE_SECONDS) == ([still], [])
    still.abort()
    assert lines.stalled(end + 1.0 + GRACE_SECONDS) == ([], [])
