"""Clairvoyant bound of eviction policies: no other choice of blocks gets more hits."""

from __future__ import annotations

from itertools import combinations

import pytest

from benchmarks.cachepool.replay import CASES, clairvoyant
from benchmarks.cachepool.trace import BLOCK_TOKENS, Request


def _requests(*prompts: tuple[int, ...]) -> list[Request]:
    return [Request(float(at), len(blocks) * BLOCK_TOKENS, 1, blocks, ()) for at, blocks in enumerate(prompts)]


def _best(prompts: tuple[tuple[int, ...], ...], capacity: int) -> int:
    """Blocks hit by the best of all choices of what to keep after each prompt."""
    reached = {frozenset[int](): 0}
    for prompt in prompts:
        after: dict[frozenset[int], int] = {}
        for held, hits in reached.items():
            hit = next((i for i, block in enumerate(prompt) if block not in held), len(prompt))
            known = sorted(held | set(prompt))
            for kept in combinations(known, min(capacity, len(known))):
                after[frozenset(kept)] = max(after.get(frozenset(kept), 0), hits + hit)
        reached = after
    return max(reached.values())


@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "prompts",
    [
        ((1, 2, 3), (9,), (1, 2, 3)),  # The head of a chain is worth keeping.
        ((3, 2, 1), (9,), (3, 2, 1)),
        ((1, 2), (3, 4), (1, 2), (3, 4)),
        ((1, 2), (1, 3), (1, 2, 4), (1, 3), (5,), (1, 2, 4)),
    ],
)
def test_the_clairvoyant_has_as_many_hits_as_the_best_choice(
    prompts: tuple[tuple[int, ...], ...], capacity: int
) -> None:
    found = clairvoyant(_requests(*prompts), capacity, CASES["dense"].profile)
    assert found.hit_tokens == _best(prompts, capacity) * BLOCK_TOKENS
