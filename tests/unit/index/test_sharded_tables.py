"""Sharded tables of hashes behave as a dictionary and a set."""

from __future__ import annotations

import random

from prfaas.index.ancestry import ShardedDict, ShardedSet
from prfaas.types import BlockHash

RANDOM = random.Random(1)
HASHES = [BlockHash(RANDOM.randbytes(16)) for _ in range(1000)]


def test_a_sharded_dictionary_behaves_as_a_dictionary() -> None:
    sharded, plain = ShardedDict[int](), dict[BlockHash, int]()
    for step in range(5000):
        block_hash = RANDOM.choice(HASHES)
        if RANDOM.random() < 0.4:
            assert sharded.pop(block_hash) == plain.pop(block_hash, None)
        else:
            sharded[block_hash] = plain[block_hash] = step
        assert (block_hash in sharded) == (block_hash in plain)
        assert len(sharded) == len(plain)
    known, missing = sorted(plain), [block_hash for block_hash in HASHES if block_hash not in plain]
    assert [sharded[block_hash] for block_hash in known] == [plain[block_hash] for block_hash in known]
    assert sharded.has_all(known) and not sharded.has_all([*known, missing[0]])
    assert not sharded.has_any(missing) and sharded.has_any([*missing, known[0]])
    del sharded[known[0]]
    assert known[0] not in sharded
    assert max(map(len, sharded.shards)) < 20, "hashes lie in many shards"


def test_a_sharded_set_behaves_as_a_set() -> None:
    sharded, plain = ShardedSet(), set[BlockHash]()
    for _ in range(300):
        some = RANDOM.sample(HASHES, 20)
        if RANDOM.random() < 0.5:
            sharded.update(some)
            plain.update(some)
        else:
            sharded.difference_update(some)
            plain.difference_update(some)
        assert sharded.lacking(some) == set(some) - plain
        assert sharded.has_all(some) == plain.issuperset(some)
        assert (some[0] in sharded) == (some[0] in plain)
    assert set(sharded) == plain and len(sharded) == len(plain)
