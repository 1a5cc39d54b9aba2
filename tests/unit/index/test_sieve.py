"""What was added passes, most else does not, and a rebuild forgets."""

from __future__ import annotations

import random

import numpy as np

from prfaas.index.sieve import Sieve


def passing(sieve: Sieve, keys: list[int]) -> list[int]:
    return [keys[position] for position in sieve.passing(np.array(keys, np.uint64)).tolist()]


def test_what_was_added_passes_whatever_the_number_and_little_else() -> None:
    chance, sieve, added = random.Random(1), Sieve(), [1 << 63, 0]
    for _ in range(5000):
        added.append(chance.getrandbits(64))
        if not sieve.add(added[-1]):
            sieve.rebuild(added)
    others = [chance.getrandbits(64) for _ in range(10_000)]
    sieve.rebuild(added)
    assert passing(sieve, added) == added
    assert len(passing(sieve, others)) < len(others) / 20


def test_a_rebuild_forgets_what_it_was_not_told() -> None:
    sieve = Sieve()
    sieve.add(7)
    assert passing(sieve, [6, 7, 8]) == [7]
    sieve.rebuild([8])
    assert passing(sieve, [6, 7, 8]) == [8]
