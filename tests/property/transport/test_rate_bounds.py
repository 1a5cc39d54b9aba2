"""A link's rate lies between its bounds, whatever is handed over when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.transport.congestion.rate_estimator import RateBounds

CHECK_SECONDS = 0.05
pieces = st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 1_000_000)), min_size=1, max_size=20)


@given(pieces, st.floats(1e5, 1e9), st.floats(0.0, 0.3))
def test_the_rate_of_a_link_lies_between_its_bounds(
    taken: list[tuple[float, int]], rate: float, rtt_seconds: float
) -> None:
    """Hand pieces over one connection after random pauses; the link serves them in order."""
    bounds = RateBounds()
    events: list[tuple[float, int, int]] = []  # Time, kind (0 landing, 1 handover) and bytes.
    now = free_at = 0.0
    for pause, num_bytes in taken:
        now += pause
        free_at = max(now, free_at) + num_bytes / rate
        events += [(now, 1, num_bytes), (free_at + rtt_seconds, 0, num_bytes)]
    checked_at = 0.0
    for at, kind, num_bytes in sorted(events, key=lambda event: event[:2]):
        while checked_at < at:
            assert bounds.most(rtt_seconds=rtt_seconds, num_connections=1, now=checked_at) >= rate * (1 - 1e-6)
            checked_at += CHECK_SECONDS
        if kind:
            bounds.on_written(num_bytes, now=at)
        else:
            bounds.on_delivered(num_bytes, rtt_seconds=rtt_seconds, now=at)
        assert bounds.take_lower_bound() <= rate * (1 + 1e-6)


@pytest.mark.parametrize("rate", [1.2e6, 12e6])
def test_bounds_of_waiting_pieces_come_near_the_rate(rate: float) -> None:
    bounds, size = RateBounds(), 1_000_000
    for _ in range(40):
        bounds.on_written(size, now=0.0)
    least = 0.0
    for number in range(1, 21):
        bounds.on_delivered(size, rtt_seconds=0.0, now=number * size / rate)
        least = max(least, bounds.take_lower_bound())
    most = bounds.most(rtt_seconds=0.0, num_connections=1, now=20 * size / rate)
    assert least == pytest.approx(rate, rel=0.01)
    assert most == pytest.approx(rate, rel=0.06)


@given(st.permutations(range(12)), st.floats(1e5, 1e9))
def test_pieces_that_overtake_a_lost_piece_do_not_lower_the_upper_bound(order: list[int], rate: float) -> None:
    """Hand all pieces over at once; they arrive in a random order and land in their own."""
    bounds, size = RateBounds(), 1_000_000
    for _ in order:
        bounds.on_written(size, now=0.0)
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
            bounds.on_delivered(size, rtt_seconds=0.0, now=now)
