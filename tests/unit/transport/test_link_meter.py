"""What a link carries and whether it is choked, from made samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from prfaas.transport.congestion.rate_estimator import LinkHealth, LinkSample, RateEstimator

STEP_SECONDS = 0.05
MB = 1_000_000


def _fed(meter: RateEstimator, samples: Iterator[LinkSample]) -> list[LinkHealth]:
    healths = []
    for sample in samples:
        meter.add(sample)
        healths.append(meter.health)
    return healths


def _samples(
    rate: Callable[[float], float], seconds: float, *, queued: int = 8 * MB, rtt: float = 0.03, lost: float = 0.0
) -> Iterator[LinkSample]:
    acknowledged = 0.0
    for step in range(int(seconds / STEP_SECONDS)):
        at = step * STEP_SECONDS
        acknowledged += rate(at) * STEP_SECONDS
        sent = int(acknowledged * (1 + lost))
        yield LinkSample(at, int(acknowledged), sent, sent - int(acknowledged), queued, 0, rtt, 0.03)


def test_a_saturated_link_carries_what_is_acknowledged_and_a_change_shows_within_a_second() -> None:
    health = _fed(RateEstimator(), _samples(lambda at: 100 * MB if at < 2 else 30 * MB, 4))
    at_two, at_three = health[int(1.9 / STEP_SECONDS)], health[int(3 / STEP_SECONDS)]
    assert at_two.achievable_bytes_per_second == pytest.approx(100 * MB, rel=0.02)
    assert at_three.achievable_bytes_per_second == pytest.approx(30 * MB, rel=0.02)


def test_a_dip_of_a_quarter_second_is_not_taken_for_the_links_rate() -> None:
    health = _fed(RateEstimator(), _samples(lambda at: 20 * MB if 2 <= at < 2.25 else 100 * MB, 4))
    assert min(its.achievable_bytes_per_second for its in health[10:]) == pytest.approx(100 * MB, rel=0.02)


IDLE = LinkSample(0.0, 0, 0, 0, 0, 0, 0.03, 0.03)


def _rates(meter: RateEstimator, samples: Iterable[LinkSample]) -> list[float]:
    return [its.achievable_bytes_per_second for its in _fed(meter, iter(samples))]


def test_what_a_link_carries_without_being_late_is_not_its_own_rate() -> None:
    samples = (IDLE._replace(at=second, least_bytes_per_second=100.0 * MB) for second in range(10))
    assert set(_rates(RateEstimator(), samples)) == {0.0}


def test_what_is_late_shows_a_links_rate_and_what_lands_faster_raises_it() -> None:
    samples = [
        IDLE._replace(most_bytes_per_second=20.0 * MB),
        IDLE._replace(at=1, most_bytes_per_second=10.0 * MB),
        IDLE._replace(at=2, most_bytes_per_second=12.0 * MB),
        IDLE._replace(at=3),
        IDLE._replace(at=4, least_bytes_per_second=50.0 * MB),
        IDLE._replace(at=5, least_bytes_per_second=1.0 * MB),
    ]
    assert _rates(RateEstimator(), samples) == [20.0 * MB, 10.0 * MB, 10.0 * MB, 10.0 * MB, 50.0 * MB, 50.0 * MB]


def test_a_kernel_that_takes_much_at_once_does_not_hide_that_a_link_is_narrow() -> None:
    meter = RateEstimator()
    *_, last = _fed(
        meter, (sample._replace(most_bytes_per_second=3.0 * MB) for sample in _samples(lambda at: 100 * MB, 2))
    )
    assert last.achievable_bytes_per_second == 3.0 * MB


def test_a_link_that_stalls_with_a_full_queue_is_choked_and_what_is_late_bounds_its_rate() -> None:
    def samples() -> Iterator[LinkSample]:
        for sample in _samples(lambda at: 100 * MB if at < 2 else 0, 4):
            late_seconds = sample.at - 2
            yield sample._replace(most_bytes_per_second=MB / late_seconds) if late_seconds >= 0.5 else sample

    *_, last = _fed(RateEstimator(), samples())
    assert last.achievable_bytes_per_second == pytest.approx(MB / 1.95)
    assert last.congestion == "queue"


def test_a_rate_that_nothing_confirms_for_half_a_minute_is_not_known_any_more() -> None:
    meter = RateEstimator()
    late = IDLE._replace(most_bytes_per_second=10.0 * MB)
    confirming = IDLE._replace(at=20, least_bytes_per_second=9.0 * MB)
    rates = _rates(meter, [late, confirming, *(IDLE._replace(at=20 + second) for second in (29, 30, 31))])
    assert rates == [10.0 * MB, 10.0 * MB, 10.0 * MB, 0.0, 0.0]
    assert _rates(meter, [IDLE._replace(at=60, most_bytes_per_second=2.0 * MB)]) == [2.0 * MB]


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
def test_a_link_is_choked_by_a_queue_by_loss_or_by_its_round_trip(
    queued: int, rtt: float, lost: float, reason: str | None
) -> None:
    *_, last = _fed(RateEstimator(), _samples(lambda at: 100 * MB, 2, queued=queued, rtt=rtt, lost=lost))
    assert last.congestion == reason


@pytest.mark.parametrize(("rate", "reason"), [(0.2 * MB, None), (MB, "loss")])
def test_one_segment_that_is_sent_again_among_few_is_no_loss(rate: float, reason: str | None) -> None:
    samples = _samples(lambda at: rate, 2, queued=1000, lost=0.05)
    *_, last = _fed(RateEstimator(), (sample._replace(segment_bytes=1448) for sample in samples))
    assert last.resent_ratio > 0.03
    assert last.congestion == reason


def test_an_idle_link_has_no_queue_and_no_rate() -> None:
    *_, last = _fed(RateEstimator(), _samples(lambda at: 0.0, 2, queued=0))
    assert last == LinkHealth(0.0, 0.0, None)


@pytest.mark.parametrize(("rtt", "reason"), [(0.0004, None), (0.02, "rtt")])
def test_microseconds_on_a_short_link_are_no_congestion(rtt: float, reason: str | None) -> None:
    meter = RateEstimator()
    *_, last = _fed(
        meter, (sample._replace(rtt_seconds=rtt, min_rtt_seconds=0.00005) for sample in _samples(_steady, 2))
    )
    assert last.congestion == reason


def _steady(_: float) -> float:
    return 100 * MB


@pytest.mark.parametrize(
    ("busy", "by_receiver", "by_buffer", "limit"),
    [
        (0.1, 0.0, 0.0, "application"),
        (0.9, 0.6, 0.1, "receiver_window"),
        (0.9, 0.1, 0.6, "send_buffer"),
        (0.9, 0.1, 0.1, "network"),
    ],
)
def test_a_link_is_limited_by_what_its_connections_spend_most_of_their_time_with(
    busy: float, by_receiver: float, by_buffer: float, limit: str
) -> None:
    samples = [
        IDLE._replace(
            at=at,
            connection_seconds=8 * at,
            busy_seconds=8 * busy * at,
            receiver_limited_seconds=8 * by_receiver * at,
            buffer_limited_seconds=8 * by_buffer * at,
        )
        for at in (0.0, 0.1, 0.2)
    ]
    assert [its.limit for its in _fed(RateEstimator(), iter(samples))] == [None, limit, limit]


def test_a_full_link_says_how_full_it_is_and_what_share_it_sends_again() -> None:
    last = _fed(RateEstimator(), _samples(lambda at: 100 * MB, 4, lost=0.01))[-1]
    assert last.utilization_ratio == pytest.approx(1, rel=0.02)
    assert last.resent_ratio == pytest.approx(0.01, rel=0.05)


def _when_steady(rate: Callable[[float], float]) -> list[bool]:
    meter, found = RateEstimator(), []
    for sample in _samples(rate, 2):
        meter.add(sample)
        found.append(meter.is_steady)
    return found


def test_a_rate_is_steady_once_two_windows_that_share_nothing_agree() -> None:
    assert 0.55 <= _when_steady(lambda at: 100 * MB).index(True) * STEP_SECONDS <= 0.75
    changed = _when_steady(lambda at: 100 * MB if at < 1 else 30 * MB)
    assert 1.75 <= changed.index(True, 30) * STEP_SECONDS <= 1.95, "its rate is the most of two thirds of a second"


def test_a_burst_into_a_buffer_on_the_way_is_not_steady_while_it_counts() -> None:
    found = _when_steady(lambda at: 300 * MB if 0.6 <= at < 0.8 else 100 * MB)
    assert not any(found[round(0.9 / STEP_SECONDS) : round(1.3 / STEP_SECONDS)]) and found[-1]


@pytest.mark.parametrize("rate", [lambda at: MB * 2 ** (10 * at), lambda at: 0.0])
def test_a_rate_that_still_grows_is_not_steady_and_neither_is_none(rate: Callable[[float], float]) -> None:
    assert not any(_when_steady(rate))


def test_what_a_probe_has_shown_is_said_to_be_a_probes_until_transfers_confirm_it() -> None:
    meter = RateEstimator()
    meter.source = "probe"
    *_, probed = _fed(meter, _samples(lambda at: 100 * MB, 1))
    meter.source = "transfers"
    samples = [IDLE._replace(at=2.0), IDLE._replace(at=3.0, least_bytes_per_second=90.0 * MB)]
    healths = [probed, *_fed(meter, iter(samples))]
    assert [health.rate_source for health in healths] == ["probe", "probe", "transfers"]
    assert [health.achievable_bytes_per_second for health in healths] == pytest.approx([100 * MB] * 3)


def test_what_is_forgotten_is_not_known() -> None:
    meter = RateEstimator()
    _fed(meter, _samples(lambda at: 100 * MB, 1))
    meter.forget(least_bytes_per_second=0.0, now=1.0)
    assert meter.health == LinkHealth()
    assert _fed(meter, iter([IDLE._replace(at=2.0)])) == [LinkHealth()]


def test_a_lower_bound_is_said_until_the_rate_is_known_and_no_longer_than_a_rate_is() -> None:
    meter = RateEstimator()
    meter.forget(least_bytes_per_second=5.0 * MB, now=1.0)
    assert meter.health == LinkHealth(least_bytes_per_second=5.0 * MB)
    *_, before, after = _fed(meter, iter([IDLE._replace(at=30.9), IDLE._replace(at=31.0)]))
    assert (before.least_bytes_per_second, after.least_bytes_per_second) == (5.0 * MB, 0.0)
    meter.forget(least_bytes_per_second=5.0 * MB, now=1.0)
    *_, known = _fed(meter, _samples(lambda at: 100 * MB, 2))
    assert known.least_bytes_per_second == 0.0
    assert known.achievable_bytes_per_second == pytest.approx(100 * MB)


def test_chunks_of_a_probes_start_that_are_late_say_nothing_of_the_link() -> None:
    meter = RateEstimator()
    meter.source = "probe"
    late = [IDLE._replace(at=at, most_bytes_per_second=8.0 * MB) for at in (1.0, 1.1)]
    assert {its.achievable_bytes_per_second for its in _fed(meter, iter(late))} == {0.0}
