"""Candidates leave in the order of their keys, however often they come and go; policies rank as they say."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from prfaas.cachepool.block_run import BlockRun
from prfaas.cachepool.eviction import BlockFacts, Candidates, cost, lfu, lru, policy_of
from prfaas.kv.group import KVGroup
from tests.support.pool_layouts import ROOT


def _facts(kind: str = "attention", *, num_tokens: int = 512, last_used: int = 1, num_uses: int = 1) -> BlockFacts:
    group = KVGroup("linear_state" if kind == "state" else "full_attention", 512)
    return BlockFacts(group.rules.saved_tokens(group, num_tokens), num_tokens, 1 << 20, last_used, num_uses)


def _run() -> BlockRun:
    return BlockRun(0, 0, None, ROOT, 32, 32)


def _drain(candidates: Candidates) -> list[BlockRun]:
    left = []
    while (run := candidates.pop()) is not None:
        left.append(run[0])
    return left


@pytest.mark.parametrize("seed", range(5))
def test_candidates_pop_in_the_order_of_their_latest_keys(seed: int) -> None:
    rng = random.Random(seed)
    candidates = Candidates()
    expected: dict[BlockRun, tuple[bool, float]] = {}
    runs = [_run() for _ in range(80)]
    for _ in range(2_000):
        run = rng.choice(runs)
        if rng.random() < 0.4:
            candidates.discard(run)
            expected.pop(run, None)
        else:
            soft, key = rng.random() < 0.2, rng.random()
            candidates.add(run, key, is_soft=soft)
            expected[run] = (soft, key)
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


def test_policies_rank_by_age_by_uses_and_by_savings_per_byte() -> None:
    assert lru(_facts(last_used=1, num_uses=9), 0) < lru(_facts(last_used=2), 0)
    assert lfu(_facts(last_used=9, num_uses=1), 0) < lfu(_facts(num_uses=2), 0)
    assert lfu(_facts(num_uses=3), 0) < lfu(_facts(num_uses=1), 4), "old fame fades"
    assert cost(_facts(num_tokens=32_000), 0) < cost(_facts("state", num_tokens=32_000), 0)
    assert cost(_facts(num_tokens=512), 0) < cost(_facts(num_tokens=100_000), 0), "late tokens cost more to prefill"


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    assert policy_of("cost") == "cost"
    with pytest.raises(ValueError, match="'fifo'; write one of lru, lfu, cost"):
        policy_of("fifo")
