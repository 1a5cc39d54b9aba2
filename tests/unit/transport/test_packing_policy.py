"""A link packs its chunks only while it is full and packing pays."""

import pytest

from prfaas.transport.codec.packing import FIRST_RETRY_SECONDS, LinkLoad, PackFormat, PackingCost, PackingPolicy

ZSTD, LZ4 = PackFormat("zstd", 2), PackFormat("lz4", 1)
SLOW_LINK, FAST_LINK = 0.2e9, 5e9
MIB = 1 << 20


def _load(at: float, *, rate: float = SLOW_LINK, is_full: bool = True, acknowledged: float = 0.0) -> LinkLoad:
    return LinkLoad(at, rate, 8, is_full, int(acknowledged))


def _cost(
    pack_format: PackFormat = ZSTD, *, ratio: float = 0.7, rate: float = 0.8e9, size: int = 64 << 10
) -> PackingCost:
    return PackingCost(pack_format, size, int(ratio * size), size / rate, size / rate)


def _policy(*costs: PackingCost, rate: float = SLOW_LINK, num_processors: int = 16) -> PackingPolicy:
    """Return the policy of a link that was full for a second and has made a trial."""
    policy = PackingPolicy(num_processors=num_processors)
    for tick in range(23):
        policy.observe(_load(tick * 0.05, rate=rate, acknowledged=tick * 0.05 * rate))
    assert policy.wants_trial()
    policy.learn(costs or (_cost(), _cost(LZ4, ratio=1.0)))
    return policy


def test_slow_link_packs_in_the_format_that_gains_most() -> None:
    assert _policy(_cost(LZ4, ratio=0.8), _cost(ZSTD, ratio=0.7)).format == ZSTD
    assert _policy(_cost(LZ4, ratio=0.6), _cost(ZSTD, ratio=0.7)).format == LZ4


def test_link_does_not_pack_noise_or_faster_than_its_processors() -> None:
    assert _policy(_cost(LZ4, ratio=1.0), _cost(ZSTD, ratio=1.0)).format is None
    assert _policy(rate=FAST_LINK).format is None
    assert _policy(rate=0.6e9, num_processors=16).format == ZSTD
    assert _policy(rate=0.6e9, num_processors=1).format is None


def test_link_without_connections_stops_packing() -> None:
    policy = _policy()
    policy.observe(LinkLoad(2.0, SLOW_LINK, 0, is_full=True, acknowledged_bytes=0))
    policy.learn([_cost()])
    assert policy.format is None


def test_no_trial_before_the_link_was_full_for_a_second() -> None:
    policy = PackingPolicy(num_processors=16)
    for tick in range(19):
        policy.observe(_load(tick * 0.05, acknowledged=tick * 0.05 * SLOW_LINK))
        assert not policy.wants_trial()
    for tick in range(19, 99):
        policy.observe(_load(tick * 0.05, is_full=False, acknowledged=SLOW_LINK))
        assert not policy.wants_trial()


def test_failed_trials_are_repeated_at_growing_intervals() -> None:
    policy = _policy(_cost(LZ4, ratio=1.0), _cost(ZSTD, ratio=1.0))
    assert not policy.wants_trial()
    trials: list[float] = []
    now = 1.1
    while len(trials) < 3:
        now += 0.1
        policy.observe(_load(now, acknowledged=now * SLOW_LINK))
        if policy.wants_trial():
            trials.append(now)
            policy.learn((_cost(LZ4, ratio=1.0), _cost(ZSTD, ratio=1.0)))
    assert FIRST_RETRY_SECONDS < trials[1] - trials[0] < trials[2] - trials[1]


@pytest.mark.parametrize(
    "cost", [_cost(rate=0.05e9, size=MIB), _cost(ratio=1.0, size=MIB)], ids=["busy processors", "noise"]
)
def test_packing_ends_when_it_no_longer_pays(cost: PackingCost) -> None:
    policy = _policy()
    for _ in range(30):
        policy.learn([cost])
    assert policy.format is None


def test_packing_ends_when_less_arrives_than_without() -> None:
    policy = _policy()
    for tick in range(30):
        policy.observe(_load(2.0 + tick * 0.05, acknowledged=tick * 0.05 * 0.8 * SLOW_LINK))
    assert policy.format is None


def test_packing_continues_while_more_arrives_than_without() -> None:
    policy = _policy()
    for tick in range(100):
        policy.observe(_load(2.0 + tick * 0.05, acknowledged=tick * 0.05 * 1.3 * SLOW_LINK))
        policy.learn([_cost(size=MIB)])
    assert policy.format == ZSTD
    assert policy.saved_bytes == 100 * (MIB - int(0.7 * MIB))
    assert 0.6 < policy.packed_ratio < 0.8
