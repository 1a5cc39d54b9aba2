"""Between which rates a link's own lies, from made hand-overs and landings."""

from __future__ import annotations

import math

import pytest

from prfaas.transport.congestion.rate_estimator import RateBounds

MB = 1_000_000


def test_what_was_handed_over_and_has_landed_since_shows_what_the_link_carries_at_least() -> None:
    bounds = RateBounds()
    bounds.handed(2 * MB, now=10.0)
    assert bounds.take_least() == 0.0
    bounds.landed(2 * MB, rtt_seconds=0.1, now=10.3)
    assert bounds.take_least() == pytest.approx(10 * MB)
    assert bounds.take_least() == 0.0, "it is said once"


def test_what_was_handed_over_before_a_pause_says_nothing_of_the_time_after_it() -> None:
    bounds = RateBounds()
    for start in (10.0, 20.0):
        bounds.handed(2 * MB, now=start)
        bounds.landed(2 * MB, rtt_seconds=0.0, now=start + 0.5)
        assert bounds.take_least() == pytest.approx(4 * MB)


def test_nothing_is_late_for_half_a_second_after_a_round_trip() -> None:
    bounds = RateBounds()
    assert bounds.most(rtt_seconds=0.1, num_connections=1, now=5.0) == math.inf
    bounds.handed(MB, now=10.0)
    assert bounds.most(rtt_seconds=0.1, num_connections=1, now=10.5) == math.inf
    assert bounds.most(rtt_seconds=0.1, num_connections=1, now=11.1) == pytest.approx(MB)
    bounds.landed(MB, rtt_seconds=0.1, now=11.2)
    assert bounds.most(rtt_seconds=0.1, num_connections=1, now=12.0) == math.inf


def test_each_connection_may_have_a_piece_on_its_way() -> None:
    bounds = RateBounds()
    for _ in range(10):
        bounds.handed(MB, now=10.0)
    bounds.landed(2 * MB, rtt_seconds=0.0, now=10.9)
    assert bounds.most(rtt_seconds=0.0, num_connections=4, now=11.0) == pytest.approx(6 * MB)


def test_what_waits_at_the_peer_behind_a_lost_segment_has_been_carried() -> None:
    bounds = RateBounds()
    for _ in range(10):
        bounds.handed(MB, now=10.0)
    bounds.landed(2 * MB, rtt_seconds=0.0, now=10.9)
    of_so_many = {
        out_of_order_bytes: bounds.most(
            rtt_seconds=0.0, num_connections=4, now=11.0, out_of_order_bytes=out_of_order_bytes
        )
        for out_of_order_bytes in (3 * MB, 7 * MB)
    }
    assert of_so_many == pytest.approx({3 * MB: 9 * MB, 7 * MB: 10 * MB}), "no more than was handed over"


def test_after_a_lost_connection_only_what_the_others_carry_counts() -> None:
    bounds = RateBounds()
    bounds.handed(8 * MB, now=10.0)
    bounds.restart(2 * MB, now=10.4)
    assert bounds.most(rtt_seconds=0.0, num_connections=1, now=10.8) == math.inf
    bounds.landed(2 * MB, rtt_seconds=0.0, now=10.5)
    assert bounds.take_least() == 0.0, "they were handed over before"
    bounds.landed(MB, rtt_seconds=0.0, now=10.6)  # more than was known of
    bounds.handed(MB, now=11.0)
    assert bounds.most(rtt_seconds=0.0, num_connections=1, now=12.0) == pytest.approx(MB)
