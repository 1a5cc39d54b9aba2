"""Whatever is handed over when, and however much a proxy takes at once: a link's rate lies between its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.transport.congestion.rate_estimator import RateBounds

LOOK_SECONDS = 0.05
pieces = st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 1_000_000)), min_size=1, max_size=20)


@given(pieces, st.floats(1e5, 1e9), st.floats(0.0, 0.3))
def test_the_rate_of_a_link_lies_between_its_bounds(
    taken: list[tuple[float, int]], rate: float, rtt_seconds: float
) -> None:
    """One connection over a link that serves in order; pieces are handed over after these pauses."""
    bounds = RateBounds()
    events: list[tuple[float, int, int]] = []  # when, 0 lands and 1 is handed over, bytes
    now = free_at = 0.0
    for pause, num_bytes in taken:
        now += pause
        free_at = max(now, free_at) + num_bytes / rate
        events += [(now, 1, num_bytes), (free_at + rtt_seconds, 0, num_bytes)]
    looked_at = 0.0
    for at, kind, num_bytes in sorted(events, key=lambda event: event[:2]):
        while looked_at < at:
            assert bounds.most(rtt_seconds=rtt_seconds, num_connections=1, now=looked_at) >= rate * (1 - 1e-6)
            looked_at += LOOK_SECONDS
        if kind:
            bounds.handed(num_bytes, now=at)
        else:
            bounds.landed(num_bytes, rtt_seconds=rtt_seconds, now=at)
        assert bounds.take_least() <= rate * (1 + 1e-6)


@pytest.mark.parametrize("rate", [1.2e6, 12e6])
def test_of_pieces_that_wait_for_one_another_the_bounds_come_near_the_rate(rate: float) -> None:
    bounds, size = RateBounds(), 1_000_000
    for _ in range(40):
        bounds.handed(size, now=0.0)
    least = 0.0
    for number in range(1, 21):
        bounds.landed(size, rtt_seconds=0.0, now=number * size / rate)
        least = max(least, bounds.take_least())
    most = bounds.most(rtt_seconds=0.0, num_connections=1, now=20 * size / rate)
    assert least == pytest.approx(rate, rel=0.01)
    assert most == pytest.approx(rate, rel=0.06)


@given(st.permutations(range(12)), st.floats(1e5, 1e9))
def test_pieces_that_overtake_a_lost_one_do_not_make_a_link_look_slower(order: list[int], rate: float) -> None:
    """One connection, whose pieces are all handed over at once, arrive in this order and land in their own."""
    bounds, size = RateBounds(), 1_000_000
    for _ in order:
        bounds.handed(size, now=0.0)
    arrived: set[int] = set()
    num_landed = 0
    for number, piece in enumerate(order, start=1):
        waiting_bytes = (len(arrived) - num_landed) * size
        now = number * size / rate
        most = bounds.most(rtt_seconds=0.0, num_connections=1, now=now, out_of_order_bytes=waiting_bytes)
        assert most >= rate * (1 - 1e-6)
        arrived.add(piece)
        while num_landed in arrived:
            num_landed += 1
            bounds.landed(size, rtt_seconds=0.0, now=now)
