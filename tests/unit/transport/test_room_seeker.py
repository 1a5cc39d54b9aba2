"""A connection looks for a higher rate when bytes wait here and nothing waits on the link."""

from __future__ import annotations

from prfaas.transport.link_meter import LinkSample
from prfaas.transport.room_seeker import RoomSeeker

STEP_SECONDS = 0.05


def _num_due(*, rtt_seconds: float, queued_bytes: int, seconds: float = 1.0) -> int:
    seeker = RoomSeeker()
    samples = (
        LinkSample(step * STEP_SECONDS, 0, 0, 0, queued_bytes, 0, rtt_seconds, 0.04)
        for step in range(int(seconds / STEP_SECONDS))
    )
    return sum(map(seeker.is_due, samples))


def test_bytes_that_wait_while_round_trips_are_shortest_mean_room() -> None:
    assert 4 <= _num_due(rtt_seconds=0.042, queued_bytes=1) <= 7


def test_a_queue_on_the_link_means_that_it_is_full() -> None:
    assert _num_due(rtt_seconds=0.06, queued_bytes=1) == 0


def test_a_link_with_nothing_to_send_is_left_alone() -> None:
    assert _num_due(rtt_seconds=0.04, queued_bytes=0) == 0


def test_one_moment_without_a_queue_is_not_enough() -> None:
    assert _num_due(rtt_seconds=0.04, queued_bytes=1, seconds=0.15) == 0
