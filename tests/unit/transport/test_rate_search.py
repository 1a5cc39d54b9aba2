"""A connection looks for a higher rate when there is room on the link, and in its turn."""

from __future__ import annotations

import pytest

from prfaas.transport.congestion.connection_policy import PATIENCE_SECONDS, TURN_SECONDS, RateSearch
from prfaas.transport.congestion.rate_estimator import LinkSample

STEP_SECONDS = 0.05
MIN_RTT_SECONDS = 0.04


def _searches(
    *,
    rtt_seconds: float = MIN_RTT_SECONDS,
    min_rtt_seconds: float = MIN_RTT_SECONDS,
    queued: int = 0,
    unacknowledged: int = 0,
    seconds: float,
) -> list[float]:
    """When, of a link with four connections that looks alike all the time."""
    search = RateSearch()
    samples = (
        LinkSample(step * STEP_SECONDS, 0, 0, 0, queued, unacknowledged, rtt_seconds, min_rtt_seconds)
        for step in range(int(seconds / STEP_SECONDS))
    )
    return [sample.at for sample in samples if search.is_due(sample, num_connections=4)]


def test_bytes_that_wait_while_round_trips_are_shortest_mean_room() -> None:
    found = _searches(queued=1, unacknowledged=0, rtt_seconds=0.042, seconds=1)
    assert len(found) >= 3
    assert found[0] == pytest.approx(PATIENCE_SECONDS)


def test_a_queue_on_the_link_means_that_it_is_full() -> None:
    assert _searches(queued=1, rtt_seconds=0.06, seconds=1) == []


def test_one_moment_without_a_queue_is_not_enough() -> None:
    assert _searches(queued=1, seconds=0.15) == []


def test_each_connection_has_its_turn_once_in_eight_seconds() -> None:
    found = _searches(unacknowledged=1, rtt_seconds=0.05, seconds=TURN_SECONDS + STEP_SECONDS)
    assert found == pytest.approx([TURN_SECONDS * turn / 4 for turn in (1, 2, 3, 4)])


def test_a_link_with_nothing_under_way_is_left_alone() -> None:
    assert _searches(seconds=10) == []


def test_where_the_way_may_have_become_longer_bbr_measures_it() -> None:
    assert _searches(unacknowledged=1, rtt_seconds=0.2, seconds=10) == []


def test_a_short_link_is_left_to_bbr() -> None:
    assert _searches(queued=1, unacknowledged=1, rtt_seconds=0.002, min_rtt_seconds=0.002, seconds=10) == []
