"""Eviction order: policies as sort keys over plain data, and block runs sorted by their tails."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from prfaas.cachepool.block_run import BlockRun

EvictionPolicy = Literal["lru", "lfu", "cost"]
ALL = ""  # The view of every candidate.

# Length at which attention doubles the prefill cost of a token, by order of magnitude over public hybrids.
_DOUBLE_COST_TOKENS = 32_768


class BlockFacts(NamedTuple):
    """Facts about one prefix block for a policy. `last_used` counts the uses of the whole pool; it is not a time."""

    saved_tokens: int  # Tokens that need no prefill because of this block.
    num_tokens: int  # Length of the chain up to the block's end.
    num_bytes: int
    last_used: int
    num_uses: int


SortKey = Callable[[BlockFacts, float], float]


def lru(facts: BlockFacts, _floor: float) -> float:
    """Evict the least recently used block first."""
    return facts.last_used


def lfu(facts: BlockFacts, floor: float) -> float:
    """Evict the least frequently used block first; the rising `floor` ages old counts."""
    return floor + facts.num_uses


def cost(facts: BlockFacts, floor: float) -> float:
    """Evict the block that saves least prefill per byte and use first (GreedyDual-Size-Frequency)."""
    token_cost = 1 + facts.num_tokens / _DOUBLE_COST_TOKENS
    return floor + facts.num_uses * facts.saved_tokens * token_cost / facts.num_bytes


POLICIES: dict[EvictionPolicy, SortKey] = {"lru": lru, "lfu": lfu, "cost": cost}


def policy_of(text: str) -> EvictionPolicy:
    """Return the policy of that name. Raises ValueError, which names all policies, if there is none."""
    for name in POLICIES:
        if name == text:
            return name
    raise ValueError(f"eviction: {text!r}; write one of {', '.join(POLICIES)}")


class Candidates:
    """Runs whose tail may leave, least valuable first; runs with a soft-pinned tail come last.

    Each run stands in the view of all and in the views that it was added to. A view is a heap with stale entries:
    discarding a run forgets its serial number, and the heap drops the entry later. Every operation costs O(log n) a view.
    """

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[bool, float, int, BlockRun]]] = {ALL: []}  # (is_soft, key, serial, run)
        self._serials: dict[BlockRun, int] = {}
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._serials)

    def __contains__(self, run: BlockRun) -> bool:
        return run in self._serials

    def add(self, run: BlockRun, key: float, *, is_soft: bool = False, views: Iterable[str] = ()) -> None:
        """Add a run, or change the key of a run that is there."""
        self._next_serial += 1
        self._serials[run] = self._next_serial
        for view in (ALL, *views):
            heap = self._heaps.setdefault(view, [])
            heapq.heappush(heap, (is_soft, key, self._next_serial, run))
            if len(heap) > 2 * len(self._serials) + 64:
                self._compact(view)

    def discard(self, run: BlockRun) -> None:
        """Remove a run whose tail may not leave for now."""
        self._serials.pop(run, None)

    def pop(self, view: str = ALL) -> tuple[BlockRun, float] | None:
        """Remove and return the first run of a view with its key, or None when nothing may leave."""
        heap = self._heaps.get(view, [])
        while heap:
            _, key, serial, run = heapq.heappop(heap)
            if self._serials.get(run) == serial:
                del self._serials[run]
                return run, key
        return None

    def drop_view(self, view: str) -> None:
        """Forget a view that has no live runs left."""
        self._heaps.pop(view, None)

    def _compact(self, view: str) -> None:
        heap = [entry for entry in self._heaps[view] if self._serials.get(entry[3]) == entry[2]]
        heapq.heapify(heap)
        self._heaps[view] = heap
