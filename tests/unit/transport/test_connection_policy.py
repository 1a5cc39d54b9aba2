"""How many connections a link has."""

from __future__ import annotations

import pytest

from prfaas.transport.congestion.connection_policy import LOSS_BASED_CONNECTIONS, LinkThroughput, connection_count


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


@pytest.mark.parametrize(
    ("rtt_ms", "megabytes_per_second", "num_before", "count"),
    [
        (80.0, 400, 8, 11),  # of 5 Gbit/s
        (80.0, 540, 11, 14),
        (80.0, 580, 15, 15),  # half as much again as the bandwidth-delay product
        (80.0, 235, 8, 8),
        (30.0, 588, 8, 8),
        (2.0, 1177, 2, 2),
        (500.0, 5000, 8, 32),
    ],
)
def test_connections_whose_send_buffers_hold_a_link_up_become_more(
    rtt_ms: float, megabytes_per_second: float, num_before: int, count: int
) -> None:
    carried = LinkThroughput(num_before, megabytes_per_second * 1e6, 0.001)
    wanted = connection_count(rtt_seconds=rtt_ms / 1e3, congestion_control="bbr", carried=carried)
    assert wanted.count == count
    assert f"{num_before} carry {megabytes_per_second} MB/s" in wanted.reason


def test_a_count_that_was_grown_stays_where_the_link_carries_less_for_a_while() -> None:
    carried = LinkThroughput(20, 30e6, 0.0)
    assert connection_count(rtt_seconds=0.08, congestion_control="bbr", carried=carried).count == 20


def test_no_connection_is_added_where_a_queue_overflows() -> None:
    carried = LinkThroughput(8, 450e6, 0.05)
    assert connection_count(rtt_seconds=0.08, congestion_control="bbr", carried=carried).count == 8
