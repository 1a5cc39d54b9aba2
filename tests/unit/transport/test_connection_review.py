"""When a link's number of connections is looked at again."""

from __future__ import annotations

import pytest

from prfaas.transport.congestion.connection_policy import SETTLED_SECONDS, LinkThroughput, ThroughputMeter
from prfaas.transport.congestion.rate_estimator import LinkSample

STEP, RATE = 0.25, 100e6


class Link:
    """One that carries a steady rate, of which a tenth is sent twice."""

    def __init__(self) -> None:
        self._review, self._at = ThroughputMeter(), 0.0

    def over(self, seconds: float, *, queued_bytes: int = 1, num_connections: int = 8) -> list[LinkThroughput]:
        """What the review says in the next so many seconds."""
        said = []
        for _ in range(int(seconds / STEP)):
            self._at += STEP
            carried = int(self._at * RATE)
            sample = LinkSample(self._at, carried, carried, carried // 10, queued_bytes, 0, 0.1, 0.1)
            said.append(self._review.add(sample, num_connections=num_connections))
        return [its for its in said if its is not None]


def test_full_connections_say_what_they_carry_each_time_that_is_settled() -> None:
    said = Link().over(3 * SETTLED_SECONDS + STEP)
    assert [its.num_connections for its in said] == [8, 8, 8]
    assert said[0].bytes_per_second == pytest.approx(RATE)
    assert said[0].resent_ratio == pytest.approx(0.1)


def test_connections_for_which_nothing_waits_say_nothing() -> None:
    assert Link().over(5 * SETTLED_SECONDS, queued_bytes=0) == []


def test_time_in_which_nothing_waits_is_left_out() -> None:
    link, half = Link(), SETTLED_SECONDS / 2 + STEP
    assert link.over(half) == link.over(10.0, queued_bytes=0) == []
    (said,) = link.over(half)
    assert said.bytes_per_second == pytest.approx(RATE)


def test_another_number_of_connections_begins_anew() -> None:
    link = Link()
    assert link.over(SETTLED_SECONDS) == link.over(SETTLED_SECONDS, num_connections=9) == []
    (said,) = link.over(STEP, num_connections=9)
    assert said.num_connections == 9
