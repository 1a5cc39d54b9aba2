"""Added hashes pass the filter, most others do not, and a rebuild forgets."""

import itertools
import random

import numpy as np
import pytest

from prfaas.index.memory.exact_table import FingerprintFilter


def passing(hash_filter: FingerprintFilter, keys: list[int]) -> list[int]:
    return [keys[position] for position in hash_filter.passing(np.array(keys, np.uint64)).tolist()]


def test_added_hashes_pass_and_few_others_do() -> None:
    chance, hash_filter, added = random.Random(1), FingerprintFilter(), [1 << 63, 0]
    for _ in range(5000):
        added.append(chance.getrandbits(64))
        if not hash_filter.add(added[-1]):
            hash_filter.rebuild(np.array(added, np.uint64))
    others = [chance.getrandbits(64) for _ in range(10_000)]
    hash_filter.rebuild(np.array(added, np.uint64))
    assert passing(hash_filter, added) == added
    assert len(passing(hash_filter, others)) < len(others) / 20


def test_a_rebuild_keeps_only_the_given_hashes() -> None:
    hash_filter, (before, after, never) = FingerprintFilter(), (place | 5 << 48 for place in (6, 7, 8))
    hash_filter.add(before)
    assert passing(hash_filter, [before, after, never]) == [before]
    hash_filter.rebuild(np.array([after], np.uint64))
    assert passing(hash_filter, [before, after, never]) == [after]


@pytest.mark.parametrize("order", list(itertools.permutations([0, 1, 0x7FFF, 0xFFFF], 2)))
def test_all_hashes_of_a_shared_place_pass(order: tuple[int, int]) -> None:
    first, second = rivals = [tag << 48 | 3 for tag in order]
    one_by_one, rebuilt, mixed = FingerprintFilter(), FingerprintFilter(), FingerprintFilter()
    one_by_one.add(first)
    one_by_one.add(second)
    rebuilt.rebuild(np.array(rivals, np.uint64))
    mixed.rebuild(np.array([first], np.uint64))
    mixed.add(second)
    assert passing(one_by_one, rivals) == passing(rebuilt, rivals) == passing(mixed, rivals) == rivals
