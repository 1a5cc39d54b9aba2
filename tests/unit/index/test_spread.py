"""Tables of hashes in parts behave as one dictionary and one set."""

from __future__ import annotations

import random

from prfaas.index.ancestry import ShardedDict, ShardedSet
from prfaas.types import BlockHash

RANDOM = random.Random(1)
HASHES = [BlockHash(RANDOM.randbytes(16)) for _ in range(1000)]


def test_a_spread_dictionary_has_what_a_dictionary_has() -> None:
    spread, plain = ShardedDict[int](), dict[BlockHash, int]()
    for step in range(5000):
        its = RANDOM.choice(HASHES)
        if RANDOM.random() < 0.4:
            assert spread.pop(its) == plain.pop(its, None)
        else:
            spread[its] = plain[its] = step
        assert (its in spread) == (its in plain)
        assert len(spread) == len(plain)
    known, missing = sorted(plain), [its for its in HASHES if its not in plain]
    assert [spread[its] for its in known] == [plain[its] for its in known]
    assert spread.has_all(known) and not spread.has_all([*known, missing[0]])
    assert spread.has_none(missing) and not spread.has_none([*missing, known[0]])
    spread.update((its, -1) for its in missing)
    assert len(spread) == len(HASHES) and spread[missing[0]] == -1
    del spread[known[0]]
    assert known[0] not in spread


def test_a_spread_set_has_what_a_set_has() -> None:
    spread, plain = ShardedSet(), set[BlockHash]()
    for _ in range(300):
        some = RANDOM.sample(HASHES, 20)
        if RANDOM.random() < 0.5:
            spread.update(some)
            plain.update(some)
        else:
            spread.discard_each(some)
            plain.difference_update(some)
        assert spread.lacking(some) == set(some) - plain
        assert spread.has_all(some) == plain.issuperset(some)
    spread.add(HASHES[0])
    assert set(spread) == plain | {HASHES[0]} and len(spread) == len(plain | {HASHES[0]})
    assert HASHES[0] in spread


def test_hashes_spread_over_many_parts() -> None:
    spread = ShardedDict[int]()
    spread.update((its, 0) for its in HASHES)
    assert max(map(len, spread.parts)) < 20
