"""For how long a peer has been out of reach."""

from __future__ import annotations

import pytest

from prfaas.transport.congestion.stall_detector import FRUITLESS_SECONDS, STEADY_SECONDS, PeerLiveness


def _gone(reach: PeerLiveness, now: float, *, is_connected: bool = False, is_owed: bool = True) -> float:
    return reach.gone_seconds(now=now, is_connected=is_connected, is_owed=is_owed)


def test_a_peer_is_gone_from_its_last_connection_on() -> None:
    reach = PeerLiveness(now=0.0)
    assert _gone(reach, 5.0) == 5.0, "it never had one"
    reach.lost(now=5.0, lived_seconds=STEADY_SECONDS)
    assert _gone(reach, 6.0) == 1.0


def test_a_connection_that_ended_at_once_is_none_unless_bytes_came_through() -> None:
    reach = PeerLiveness(now=0.0)
    reach.lost(now=5.0, lived_seconds=STEADY_SECONDS / 2)
    assert _gone(reach, 6.0) == 6.0
    reach.progressed(now=6.5)
    reach.lost(now=7.0, lived_seconds=STEADY_SECONDS / 2)
    assert _gone(reach, 7.0) == 0.5


@pytest.mark.parametrize("is_owed", [False, True])
def test_a_peer_that_has_connections_is_gone_when_what_is_owed_does_not_come(is_owed: bool) -> None:
    reach = PeerLiveness(now=0.0)
    for second in range(100):
        gone_seconds = _gone(reach, float(second), is_connected=True, is_owed=is_owed)
        assert gone_seconds == (second if is_owed else 0) - FRUITLESS_SECONDS


def test_time_in_which_nothing_was_under_way_does_not_count_whether_or_not_there_was_a_connection() -> None:
    reach = PeerLiveness(now=0.0)
    reach.lost(now=1.0, lived_seconds=STEADY_SECONDS)
    for second in range(1, 31):
        _gone(reach, float(second), is_owed=False)
    assert _gone(reach, 30.5) == 0.5
    assert _gone(reach, 31.0, is_connected=True) == 1.0 - FRUITLESS_SECONDS


def test_connections_that_wait_for_nothing_count_until_they_are_lost() -> None:
    reach = PeerLiveness(now=0.0)
    _gone(reach, 50.0, is_connected=True, is_owed=False)
    assert _gone(reach, 51.0) == 1.0
