"""Hit counts of prefixes decay, and the coldest prefixes are dropped."""

import pytest

from prfaas.hashing import HashChain, root_hash
from prfaas.scheduler.popularity import MAX_PREFIXES, MEMORY_SECONDS, Popularity
from prfaas.types import Prefix

CHAIN = HashChain(root_hash("m"), range(400))
UNITS = b"".join(CHAIN.units)


def _hit(popularity: Popularity, num_tokens: int = 320, *, now: float = 0.0, stated: tuple[int, ...] = ()) -> None:
    checkpoints = [(length, CHAIN.at(length)) for length in stated]
    popularity.hit("m", UNITS, num_tokens, checkpoints=checkpoints, now=now)


def _rates(popularity: Popularity, now: float) -> dict[Prefix, float]:
    return dict(popularity.hottest(10, 0.0, now=now))


def test_steady_rate_is_measured_and_decays() -> None:
    popularity = Popularity()
    for number in range(1000):
        _hit(popularity, now=number / 5)
    (rate,) = _rates(popularity, 200.0).values()
    assert rate == pytest.approx(5.0, rel=0.05)
    (later,) = _rates(popularity, 200.0 + MEMORY_SECONDS).values()
    assert later == pytest.approx(5.0 / 2.718, rel=0.05)


def test_prefix_is_named_by_the_hash_of_its_exact_length() -> None:
    popularity = Popularity()
    _hit(popularity, 320)
    _hit(popularity, 327, stated=(300, 327))
    _hit(popularity, 329)  # The query has no hash of the first 329 tokens.
    _hit(popularity, 48)  # Too short to be worth a copy.
    lengths = {rate.num_tokens: rate for rate in _rates(popularity, 0.0)}
    assert lengths.keys() == {320, 327}
    assert lengths[327] == Prefix("m", b"".join(CHAIN.units[:20]), 327, CHAIN.at(327))
    assert lengths[320].end_hash == CHAIN.at(320)


def test_coldest_prefixes_are_dropped_when_full() -> None:
    popularity = Popularity()
    _hit(popularity)
    _hit(popularity)
    for number in range(MAX_PREFIXES):
        chain = HashChain(root_hash(f"{number}"), range(64))
        popularity.hit("m", b"".join(chain.units), 64, checkpoints=(), now=0.0)
    assert len(popularity) <= MAX_PREFIXES
    assert popularity.hottest(1, 0.0, now=0.0)[0][0].num_tokens == 320


def test_cold_prefixes_are_dropped() -> None:
    popularity = Popularity()
    _hit(popularity)
    popularity.forget_below(0.05, now=1.0)
    assert len(popularity) == 1
    popularity.forget_below(0.05, now=10.0)
    assert len(popularity) == 0
