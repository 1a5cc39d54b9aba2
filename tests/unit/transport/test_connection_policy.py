"""How many connections a link has."""

from __future__ import annotations

import pytest

from prfaas.transport.connection_policy import LOSS_BASED_CONNECTIONS, connection_count


@pytest.mark.parametrize(
    ("rtt_ms", "count"), [(0.05, 2), (2.0, 2), (5.0, 3), (10.0, 6), (30.0, 8), (80.0, 8), (250.0, 8)]
)
def test_connections_follow_the_bandwidth_delay_product_between_two_and_eight(rtt_ms: float, count: int) -> None:
    wanted = connection_count(rtt_seconds=rtt_ms / 1e3, congestion_control="bbr")
    assert (wanted.count, wanted.keeps_warm) == (count, True)
    assert f"{rtt_ms:.1f} ms" in wanted.reason


@pytest.mark.parametrize("name", ["cubic", "reno"])
def test_a_long_link_without_bbr_has_many_that_are_not_kept(name: str) -> None:
    wanted = connection_count(rtt_seconds=0.03, congestion_control=name)
    assert (wanted.count, wanted.keeps_warm) == (LOSS_BASED_CONNECTIONS, False)
    assert name in wanted.reason and "bbr" in wanted.reason


def test_a_short_link_without_bbr_is_like_one_with_it() -> None:
    assert connection_count(rtt_seconds=0.001, congestion_control="cubic").count == 2
