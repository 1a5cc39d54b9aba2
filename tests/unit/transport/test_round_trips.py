"""A link's round trip is that of a connection that measures it, beside that connection's own least."""

from __future__ import annotations

import pytest

from prfaas.transport.congestion.rate_estimator import FRESH_SEGMENTS, RoundTrip, RoundTripTracker

NEAR, FAR = RoundTrip(0.03, 0.03), RoundTrip(0.08, 0.08)
LATE = RoundTrip(0.15, 0.03)  # as a burst left it


def test_what_a_connection_measured_before_it_fell_idle_is_not_the_links_round_trip() -> None:
    trips, known = RoundTripTracker[str](), {"was full": LATE, "is used": RoundTrip(0.032, 0.03)}
    trips.heard({"was full": 400, "is used": 0}, in_flight=["was full"])
    assert trips.of(known) == LATE
    trips.heard({"was full": 0, "is used": 45}, in_flight=["is used"])
    assert trips.of(known) == RoundTrip(0.032, 0.03)


def test_a_connection_that_is_used_again_counts_once_enough_was_acknowledged() -> None:
    trips, known = RoundTripTracker[str](), {"a": LATE, "b": NEAR}
    trips.heard({"a": 0, "b": 0}, in_flight=["a"])
    assert trips.of(known) == NEAR, "nothing has come back yet"
    trips.heard({"a": FRESH_SEGMENTS - 1, "b": 0}, in_flight=["a"])
    assert trips.of(known) == NEAR
    trips.heard({"a": 1, "b": 0}, in_flight=[])
    assert trips.of(known) == LATE


def test_pings_measure_nothing_that_counts() -> None:
    trips = RoundTripTracker[str]()
    for _ in range(3 * FRESH_SEGMENTS):
        trips.heard({"a": 1}, in_flight=[])
        trips.heard({"a": 0}, in_flight=[])
    assert trips.of({"a": LATE}) == RoundTrip(0.03, 0.03)


def test_connections_over_unlike_ways_are_each_compared_with_their_own_least() -> None:
    trips, known = RoundTripTracker[str](), {"near": NEAR, "far": FAR}
    trips.heard({"near": 100, "far": 100}, in_flight=["near", "far"])
    assert not trips.of(known).is_long
    assert trips.of({**known, "near": RoundTrip(0.078, 0.03)}) == RoundTrip(0.078, 0.03), "which has risen most"


def test_a_link_of_no_connections_has_no_round_trip() -> None:
    assert RoundTripTracker[str]().of({}) == RoundTrip(0.0, 0.0)
    assert not RoundTrip(0.0, 0.0).is_long


@pytest.mark.parametrize(("seconds", "least", "is_long"), [(0.074, 0.03, False), (0.076, 0.03, True)])
def test_a_round_trip_is_long_beyond_two_and_a_half_times_its_least(
    seconds: float, least: float, is_long: bool
) -> None:
    assert RoundTrip(seconds, least).is_long == is_long
