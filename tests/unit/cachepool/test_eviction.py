"""Candidates for eviction leave in the order of their last use, however often they come and go."""

import random
import tracemalloc

import pytest

from prfaas.cachepool.block_run import BlockRun
from prfaas.cachepool.capacity import Candidates
from tests.support.pool_layouts import ROOT


def _run() -> BlockRun:
    return BlockRun(0, 0, None, ROOT, 32, 32)


def _drain(candidates: Candidates) -> list[BlockRun]:
    left = []
    while (run := candidates.pop()) is not None:
        left.append(run)
    return left


@pytest.mark.parametrize("seed", range(5))
def test_candidates_pop_in_the_order_of_their_last_use(seed: int) -> None:
    rng = random.Random(seed)
    candidates = Candidates()
    expected: dict[BlockRun, int] = {}
    runs = [_run() for _ in range(80)]
    for now in range(2_000):
        run = rng.choice(runs)
        if rng.random() < 0.4:
            candidates.discard(run)
            expected.pop(run, None)
        else:
            candidates.add(run, now)
            expected[run] = now
    assert len(candidates) == len(expected)
    assert _drain(candidates) == sorted(expected, key=expected.__getitem__)
    assert len(candidates) == 0


def test_discarded_candidates_take_no_memory() -> None:
    candidates, run = Candidates(), _run()
    tracemalloc.start()
    try:
        for round_ in range(10_000):
            candidates.add(run, round_, views=("tenant a",))
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 100_000, "an entry takes 150 bytes"
