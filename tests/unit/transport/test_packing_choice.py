"""Chunks are packed only while the link is full, the sample says that it pays, and no less arrives than before."""

from __future__ import annotations

from prfaas.transport.codec.packing import FIRST_RETRY_SECONDS, LinkLoad, PackFormat, PackingCost, PackingPolicy

ZSTD, LZ4 = PackFormat("zstd", 2), PackFormat("lz4", 1)
SLOW_LINK, FAST_LINK = 0.2e9, 5e9
MIB = 1 << 20


def pace(at: float, *, rate: float = SLOW_LINK, is_full: bool = True, acknowledged: float = 0.0) -> LinkLoad:
    return LinkLoad(at, rate, 8, is_full, int(acknowledged))


def sample(way: PackFormat = ZSTD, *, ratio: float = 0.7, rate: float = 0.8e9, size: int = 64 << 10) -> PackingCost:
    return PackingCost(way, size, int(ratio * size), size / rate, size / rate)


def packing(*samples: PackingCost, rate: float = SLOW_LINK, num_processors: int = 16) -> PackingPolicy:
    """A choice that has seen a second of a full link, and been shown a trial."""
    choice = PackingPolicy(num_processors=num_processors)
    for tick in range(23):
        choice.observe(pace(tick * 0.05, rate=rate, acknowledged=tick * 0.05 * rate))
    assert choice.wants_trial()
    choice.learn(samples or (sample(), sample(LZ4, ratio=1.0)))
    return choice


def test_a_slow_link_packs_in_the_way_that_gains_most() -> None:
    assert packing(sample(LZ4, ratio=0.8), sample(ZSTD, ratio=0.7)).way == ZSTD
    assert packing(sample(LZ4, ratio=0.6), sample(ZSTD, ratio=0.7)).way == LZ4


def test_noise_is_sent_as_it_is() -> None:
    assert packing(sample(LZ4, ratio=1.0), sample(ZSTD, ratio=1.0)).way is None


def test_a_link_that_outruns_the_processors_does_not_pack() -> None:
    assert packing(rate=FAST_LINK).way is None


def test_a_host_with_few_processors_does_not_pack_what_a_larger_one_does() -> None:
    assert packing(rate=0.6e9, num_processors=16).way == ZSTD
    assert packing(rate=0.6e9, num_processors=1).way is None


def test_a_chunk_packed_before_the_lost_connections_are_counted_again_ends_packing() -> None:
    choice = packing()
    choice.observe(LinkLoad(2.0, SLOW_LINK, 0, is_full=True, acknowledged_bytes=0))
    choice.learn([sample()])
    assert choice.way is None


def test_nothing_is_tried_before_the_link_has_been_full_for_a_second() -> None:
    choice = PackingPolicy(num_processors=16)
    for tick in range(19):
        choice.observe(pace(tick * 0.05, acknowledged=tick * 0.05 * SLOW_LINK))
        assert not choice.wants_trial()
    for tick in range(19, 99):
        choice.observe(pace(tick * 0.05, is_full=False, acknowledged=SLOW_LINK))
        assert not choice.wants_trial()


def test_one_connection_tries_and_the_next_trial_comes_after_an_ever_longer_while() -> None:
    choice = packing(sample(LZ4, ratio=1.0), sample(ZSTD, ratio=1.0))
    assert not choice.wants_trial()
    tried: list[float] = []
    now = 1.1
    while len(tried) < 3:
        now += 0.1
        choice.observe(pace(now, acknowledged=now * SLOW_LINK))
        if choice.wants_trial():
            tried.append(now)
            choice.learn((sample(LZ4, ratio=1.0), sample(ZSTD, ratio=1.0)))
    first, second = tried[1] - tried[0], tried[2] - tried[1]
    assert FIRST_RETRY_SECONDS < first < second


def test_packing_ends_when_processors_become_scarce() -> None:
    choice = packing()
    assert choice.way == ZSTD
    for _ in range(30):
        choice.learn([sample(rate=0.05e9, size=MIB)])
    assert choice.way is None


def test_packing_ends_when_the_bytes_cease_to_shrink() -> None:
    choice = packing()
    for _ in range(30):
        choice.learn([sample(ratio=1.0, size=MIB)])
    assert choice.way is None


def test_packing_ends_when_less_arrives_than_without() -> None:
    choice = packing()
    for tick in range(30):
        choice.observe(pace(2.0 + tick * 0.05, acknowledged=tick * 0.05 * 0.8 * SLOW_LINK))
    assert choice.way is None


def test_packing_goes_on_while_more_arrives_than_without() -> None:
    choice = packing()
    for tick in range(100):
        choice.observe(pace(2.0 + tick * 0.05, acknowledged=tick * 0.05 * 1.3 * SLOW_LINK))
        choice.learn([sample(size=MIB)])
    assert choice.way == ZSTD
    assert choice.saved_bytes == 100 * (MIB - int(0.7 * MIB))
    assert 0.6 < choice.packed_ratio < 0.8
