"""Rate estimate, congestion and round trips of a link, from synthetic samples."""

from collections.abc import Callable, Iterable, Iterator

import pytest

from prfaas.transport.congestion.rate_estimator import LinkHealth, LinkSample, RateEstimator

STEP_SECONDS = 0.05
MB = 1_000_000
IDLE = LinkSample(0.0, 0, 0, 0, 0, 0, 0.03, 0.03)


def _healths(estimator: RateEstimator, samples: Iterable[LinkSample]) -> list[LinkHealth]:
    healths = []
    for sample in samples:
        estimator.add(sample)
        healths.append(estimator.health)
    return healths


def _rates(estimator: RateEstimator, samples: Iterable[LinkSample]) -> list[float]:
    return [health.achievable_bytes_per_second for health in _healths(estimator, samples)]


def _samples(
    rate: Callable[[float], float], seconds: float, *, queued: int = 8 * MB, rtt: float = 0.03, lost: float = 0.0
) -> Iterator[LinkSample]:
    acknowledged = 0.0
    for step in range(int(seconds / STEP_SECONDS)):
        at = step * STEP_SECONDS
        acknowledged += rate(at) * STEP_SECONDS
        sent = int(acknowledged * (1 + lost))
        yield LinkSample(at, int(acknowledged), sent, sent - int(acknowledged), queued, 0, rtt, 0.03)


def _steady(_: float) -> float:
    return 100 * MB


# Rate


def test_estimate_of_a_full_link_follows_a_change_within_a_second() -> None:
    rates = _rates(RateEstimator(), _samples(lambda at: 100 * MB if at < 2 else 30 * MB, 4))
    assert rates[int(1.9 / STEP_SECONDS)] == pytest.approx(100 * MB, rel=0.02)
    assert rates[int(3 / STEP_SECONDS)] == pytest.approx(30 * MB, rel=0.02)


def test_dip_of_a_quarter_second_does_not_lower_the_estimate() -> None:
    rates = _rates(RateEstimator(), _samples(lambda at: 20 * MB if 2 <= at < 2.25 else 100 * MB, 4))
    assert min(rates[10:]) == pytest.approx(100 * MB, rel=0.02)


def test_throughput_of_a_link_that_is_never_late_is_no_estimate() -> None:
    samples = (IDLE._replace(at=second, least_bytes_per_second=100.0 * MB) for second in range(10))
    assert set(_rates(RateEstimator(), samples)) == {0.0}


def test_late_bytes_bound_the_estimate_and_faster_arrivals_raise_it() -> None:
    samples = [
        IDLE._replace(most_bytes_per_second=20.0 * MB),
        IDLE._replace(at=1, most_bytes_per_second=10.0 * MB),
        IDLE._replace(at=2, most_bytes_per_second=12.0 * MB),
        IDLE._replace(at=3),
        IDLE._replace(at=4, least_bytes_per_second=50.0 * MB),
        IDLE._replace(at=5, least_bytes_per_second=1.0 * MB),
    ]
    assert _rates(RateEstimator(), samples) == [20.0 * MB, 10.0 * MB, 10.0 * MB, 10.0 * MB, 50.0 * MB, 50.0 * MB]


def test_kernel_that_buffers_much_does_not_hide_a_narrow_link() -> None:
    samples = (sample._replace(most_bytes_per_second=3.0 * MB) for sample in _samples(_steady, 2))
    assert _rates(RateEstimator(), samples)[-1] == 3.0 * MB


def test_stalled_link_with_a_full_queue_is_congested_at_the_rate_of_its_late_bytes() -> None:
    def samples() -> Iterator[LinkSample]:
        for sample in _samples(lambda at: 100 * MB if at < 2 else 0, 4):
            late_seconds = sample.at - 2
            yield sample._replace(most_bytes_per_second=MB / late_seconds) if late_seconds >= 0.5 else sample

    last = _healths(RateEstimator(), samples())[-1]
    assert last.achievable_bytes_per_second == pytest.approx(MB / 1.95)
    assert last.congestion == "queue"


def test_estimate_expires_unless_it_is_confirmed_within_half_a_minute() -> None:
    estimator = RateEstimator()
    late = IDLE._replace(most_bytes_per_second=10.0 * MB)
    confirming = IDLE._replace(at=20, least_bytes_per_second=9.0 * MB)
    rates = _rates(estimator, [late, confirming, *(IDLE._replace(at=20 + second) for second in (29, 30, 31))])
    assert rates == [10.0 * MB, 10.0 * MB, 10.0 * MB, 0.0, 0.0]
    assert _rates(estimator, [IDLE._replace(at=60, most_bytes_per_second=2.0 * MB)]) == [2.0 * MB]


def test_full_link_reports_its_utilization_and_retransmissions() -> None:
    last = _healths(RateEstimator(), _samples(_steady, 4, lost=0.01))[-1]
    assert last.utilization_ratio == pytest.approx(1, rel=0.02)
    assert last.resent_ratio == pytest.approx(0.01, rel=0.05)


# Congestion and limits


@pytest.mark.parametrize(
    ("queued", "rtt", "lost", "reason"),
    [
        (8 * MB, 0.03, 0.0, None),
        (80 * MB, 0.03, 0.0, "queue"),
        (8 * MB, 0.09, 0.0, "rtt"),
        (8 * MB, 0.03, 0.05, "loss"),
        (0, 0.09, 0.05, None),
    ],
)
def test_link_is_congested_by_a_queue_by_loss_or_by_long_round_trips(
    queued: int, rtt: float, lost: float, reason: str | None
) -> None:
    assert _healths(RateEstimator(), _samples(_steady, 2, queued=queued, rtt=rtt, lost=lost))[-1].congestion == reason


@pytest.mark.parametrize(("rate", "reason"), [(0.2 * MB, None), (MB, "loss")])
def test_single_retransmission_among_few_segments_is_no_loss(rate: float, reason: str | None) -> None:
    samples = _samples(lambda at: rate, 2, queued=1000, lost=0.05)
    last = _healths(RateEstimator(), (sample._replace(segment_bytes=1448) for sample in samples))[-1]
    assert last.resent_ratio > 0.03
    assert last.congestion == reason


def test_idle_link_has_no_queue_and_no_estimate() -> None:
    assert _healths(RateEstimator(), _samples(lambda at: 0.0, 2, queued=0))[-1] == LinkHealth()


@pytest.mark.parametrize(("rtt", "reason"), [(0.0004, None), (0.02, "rtt")])
def test_microseconds_on_a_short_link_are_no_congestion(rtt: float, reason: str | None) -> None:
    samples = (sample._replace(rtt_seconds=rtt, min_rtt_seconds=0.00005) for sample in _samples(_steady, 2))
    assert _healths(RateEstimator(), samples)[-1].congestion == reason


# Steady rates


def _is_steady(rate: Callable[[float], float]) -> list[bool]:
    estimator, steady = RateEstimator(), []
    for sample in _samples(rate, 2):
        estimator.add(sample)
        steady.append(estimator.is_steady)
    return steady


def test_rate_is_steady_once_two_separate_windows_agree() -> None:
    assert 0.55 <= _is_steady(_steady).index(True) * STEP_SECONDS <= 0.75
    changed = _is_steady(lambda at: 100 * MB if at < 1 else 30 * MB)
    assert 1.75 <= changed.index(True, 30) * STEP_SECONDS <= 1.95


def test_rate_is_not_steady_while_a_burst_into_a_buffer_counts() -> None:
    steady = _is_steady(lambda at: 300 * MB if 0.6 <= at < 0.8 else 100 * MB)
    assert not any(steady[round(0.9 / STEP_SECONDS) : round(1.3 / STEP_SECONDS)]) and steady[-1]


@pytest.mark.parametrize("rate", [lambda at: MB * 2 ** (10 * at), lambda at: 0.0], ids=["growing", "zero"])
def test_growing_rate_is_not_steady(rate: Callable[[float], float]) -> None:
    assert not any(_is_steady(rate))
