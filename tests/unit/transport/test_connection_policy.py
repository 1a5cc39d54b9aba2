"""Number of connections of a link, the throughput that changes it, and searches for a higher rate."""

import math

import pytest

from prfaas.transport.congestion.connection_policy import (
    DRAIN_RATIO,
    DRAIN_RETRY_SECONDS,
    DRAIN_ROUND_TRIPS,
    LOSS_BASED_CONNECTIONS,
    ROOM_SECONDS,
    TURN_SECONDS,
    LinkThroughput,
    QueueDrain,
    RateSearch,
    connection_count,
)
from prfaas.transport.congestion.rate_estimator import LinkSample

# Number of connections


@pytest.mark.parametrize(
    ("rtt_ms", "count"), [(0.05, 2), (2.0, 2), (5.0, 3), (10.0, 6), (30.0, 8), (80.0, 8), (250.0, 8)]
)
def test_first_number_follows_the_round_trip(rtt_ms: float, count: int) -> None:
    wanted = connection_count(rtt_seconds=rtt_ms / 1e3, congestion_control="bbr")
    assert (wanted.count, wanted.keeps_warm) == (count, True)


@pytest.mark.parametrize("name", ["cubic", "reno"])
def test_long_link_with_loss_based_congestion_control_has_many_that_are_not_kept(name: str) -> None:
    wanted = connection_count(rtt_seconds=0.03, congestion_control=name)
    assert (wanted.count, wanted.keeps_warm) == (LOSS_BASED_CONNECTIONS, False)
    assert connection_count(rtt_seconds=0.001, congestion_control=name).count == 2


@pytest.mark.parametrize(
    ("rtt_ms", "megabytes_per_second", "num_before", "resent_ratio", "count"),
    [
        (80.0, 400, 8, 0.001, 11),
        (80.0, 540, 11, 0.001, 14),
        # Enough for 1.5 times the bandwidth-delay product of 5 Gbit/s.
        (80.0, 580, 15, 0.001, 15),
        (80.0, 235, 8, 0.001, 8),
        (30.0, 588, 8, 0.001, 8),
        (2.0, 1177, 2, 0.001, 2),
        (500.0, 5000, 8, 0.001, 32),
        # A lower throughput takes none away, and an overflowing queue gets none.
        (80.0, 30, 20, 0.0, 20),
        (80.0, 450, 8, 0.05, 8),
    ],
)
def test_number_grows_while_send_buffers_limit_the_throughput(
    rtt_ms: float, megabytes_per_second: float, num_before: int, resent_ratio: float, count: int
) -> None:
    throughput = LinkThroughput(num_before, megabytes_per_second * 1e6, resent_ratio)
    wanted = connection_count(rtt_seconds=rtt_ms / 1e3, congestion_control="bbr", throughput=throughput)
    assert wanted.count == count


# Searches for a higher rate

STEP_SECONDS = 0.05
MIN_RTT_SECONDS = 0.04


def _searches(
    seconds: float,
    *,
    rtt_seconds: float = MIN_RTT_SECONDS,
    min_rtt_seconds: float = MIN_RTT_SECONDS,
    queued: int = 0,
    unacknowledged: int = 0,
) -> list[float]:
    """Return the times of the searches on a link of four connections whose samples are all alike."""
    search = RateSearch()
    samples = (
        LinkSample(step * STEP_SECONDS, 0, 0, 0, queued, unacknowledged, rtt_seconds, min_rtt_seconds)
        for step in range(int(seconds / STEP_SECONDS))
    )
    return [sample.at for sample in samples if search.is_due(sample, num_connections=4)]


def test_waiting_bytes_during_short_round_trips_start_a_search() -> None:
    found = _searches(1, queued=1, rtt_seconds=0.042)
    assert len(found) >= 3
    assert found[0] == pytest.approx(ROOM_SECONDS)


def test_each_connection_searches_once_in_eight_seconds() -> None:
    found = _searches(TURN_SECONDS + STEP_SECONDS, unacknowledged=1, rtt_seconds=0.05)
    assert found == pytest.approx([TURN_SECONDS * turn / 4 for turn in (1, 2, 3, 4)])


@pytest.mark.parametrize(
    ("seconds", "queued", "unacknowledged", "rtt_seconds", "min_rtt_seconds"),
    [
        (1, 1, 0, 0.06, 0.04),
        (0.15, 1, 0, 0.04, 0.04),
        (10, 0, 0, 0.04, 0.04),
        (10, 0, 1, 0.2, 0.04),
        (10, 1, 1, 0.002, 0.002),
    ],
    ids=["queue on the path", "short moment without a queue", "idle", "path has become longer", "short link"],
)
def test_no_search_where_it_would_not_help(
    seconds: float, queued: int, unacknowledged: int, rtt_seconds: float, min_rtt_seconds: float
) -> None:
    assert not _searches(
        seconds, queued=queued, unacknowledged=unacknowledged, rtt_seconds=rtt_seconds, min_rtt_seconds=min_rtt_seconds
    )


# Drains of the queue

FULL = LinkSample(0.0, 0, 0, 0, 1, 0, 2 * MIN_RTT_SECONDS, MIN_RTT_SECONDS)
RATE = 1e8


def test_link_sends_less_than_its_rate_while_its_queue_is_long() -> None:
    drain = QueueDrain()
    assert drain.limit(FULL, bytes_per_second=RATE, is_shared=True) == DRAIN_RATIO * RATE
    assert (
        drain.limit(FULL._replace(rtt_seconds=1.1 * MIN_RTT_SECONDS), bytes_per_second=RATE, is_shared=True) == math.inf
    )


@pytest.mark.parametrize(
    ("sample", "rate", "is_shared"),
    [
        (FULL._replace(queued_bytes=0), RATE, True),
        (FULL, 0.0, True),
        (FULL, RATE, False),
        (FULL._replace(rtt_seconds=0.01, min_rtt_seconds=0.001), RATE, True),
    ],
    ids=["nothing waits", "unknown rate", "one transfer", "short link"],
)
def test_no_drain_where_it_would_not_help(sample: LinkSample, rate: float, is_shared: bool) -> None:
    assert QueueDrain().limit(sample, bytes_per_second=rate, is_shared=is_shared) == math.inf


def test_queue_that_stays_is_drained_for_fifty_round_trips_in_ten_seconds() -> None:
    drain, steps = QueueDrain(), range(int(30 / STEP_SECONDS))
    samples = [FULL._replace(at=step * STEP_SECONDS) for step in steps]
    drained = [sample.at for sample in samples if drain.limit(sample, bytes_per_second=RATE, is_shared=True) < math.inf]
    assert len(drained) * STEP_SECONDS == pytest.approx(3 * DRAIN_ROUND_TRIPS * MIN_RTT_SECONDS, rel=0.1)
    pauses = [at - before for at, before in zip(drained[1:], drained, strict=False) if at - before > 2 * STEP_SECONDS]
    assert pauses == pytest.approx([DRAIN_RETRY_SECONDS] * 2, abs=2 * STEP_SECONDS)
