"""What a connection says of itself: of late, and of what waits on it."""

from __future__ import annotations

from dataclasses import replace

from prfaas.transport.congestion.stall_detector import ConnectionLiveness
from prfaas.transport.net.connection import RECENT_SECONDS, ConnectionStats, TcpHistory
from prfaas.transport.net.sockets import TcpInfo

NOTHING = TcpInfo(0.03, 0.03, 0, 0, 1448, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)


def _state(
    info: TcpInfo, *, recent: TcpHistory, pulse: ConnectionLiveness | None = None, now: float
) -> ConnectionStats:
    its = pulse or ConnectionLiveness()
    return ConnectionStats.of(("a:1", "b:2"), info, recent=recent, liveness=its, unacknowledged_bytes=0, now=now)


def test_what_is_sent_again_and_what_limits_is_of_the_last_seconds_and_not_of_its_whole_life() -> None:
    recent = TcpHistory(0.0)
    early = replace(NOTHING, bytes_sent=1000, bytes_retransmitted=500, busy_seconds=60.0, buffer_limited_seconds=60.0)
    recent.add(early, 60.0)
    at_once = _state(early, recent=recent, now=60.0)
    assert (at_once.resent_ratio, at_once.limit) == (0.5, "send_buffer"), "all that there has been"
    later = replace(early, bytes_sent=3000, bytes_retransmitted=520, busy_seconds=69.0)
    recent.add(later, 60.0 + RECENT_SECONDS)
    shown = _state(later, recent=recent, now=60.0 + RECENT_SECONDS)
    assert (shown.resent_ratio, shown.limit) == (20 / 2000, "network")
    assert (shown.sent_bytes, shown.retransmitted_bytes, shown.age_seconds) == (3000, 520, 70.0)


def test_of_many_looks_those_of_the_last_seconds_are_kept() -> None:
    recent = TcpHistory(0.0)
    for tick in range(1000):
        at = tick / 20
        recent.add(replace(NOTHING, bytes_sent=int(at * 100), busy_seconds=at), at)
    last = replace(NOTHING, bytes_sent=5000, busy_seconds=50.0)
    seconds, grown = recent.until(last, 50.0)
    assert RECENT_SECONDS <= seconds < RECENT_SECONDS + 2
    assert grown.sent_bytes == round(seconds * 100)


def test_a_connection_that_has_just_been_made_has_no_limit() -> None:
    state = _state(NOTHING, recent=TcpHistory(7.0), now=7.0)
    assert (state.limit, state.resent_ratio) == (None, 0.0)


def test_it_stands_still_for_as_long_as_something_waits_and_nothing_moves() -> None:
    pulse, recent = ConnectionLiveness(began_at=0.0), TcpHistory(0.0)
    assert _state(NOTHING, recent=recent, pulse=pulse, now=5.0).still_seconds == 0, "nothing waits"
    pulse.oldest_at = 5.0
    assert _state(NOTHING, recent=recent, pulse=pulse, now=8.0).still_seconds == 3
    pulse.acknowledged(5.0, 5.0, oldest_at=6.0, now=8.0)
    assert _state(NOTHING, recent=recent, pulse=pulse, now=9.0).still_seconds == 1
