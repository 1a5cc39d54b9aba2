"""Which prefix blocks leave first: sort keys over plain data, and the runs kept in the order of their tails (pure)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from prfaas.cachepool.block_run import BlockRun

EvictionPolicy = Literal["lru", "lfu", "cost"]
ALL = ""  # the view of every candidate

# Length at which attention doubles the prefill cost of a token, order of magnitude over public hybrids. It only ranks blocks.
_DOUBLE_COST_TOKENS = 32_768


class BlockFacts(NamedTuple):
    """What a policy may know of one prefix block. `last_used` is a count of uses of the whole pool, not a time."""

    saved_tokens: int  # Tokens that need no prefill because of this block.
    num_tokens: int  # Length of the chain up to the block's end.
    num_bytes: int
    last_used: int
    num_uses: int


SortKey = Callable[[BlockFacts, float], float]


def lru(facts: BlockFacts, _floor: float) -> float:
    """The block used longest ago leaves first."""
    return facts.last_used


def lfu(facts: BlockFacts, floor: float) -> float:
    """The block used least often leaves first, where `floor` lets old fame fade (LFU with dynamic ageing)."""
    return floor + facts.num_uses


def cost(facts: BlockFacts, floor: float) -> float:
    """The block that saves least prefill per byte and use leaves first (GreedyDual-Size-Frequency).

    A linear state saves the prefill of its whole prefix, an attention block that of its own tokens.
    """
    return floor + facts.num_uses * facts.saved_tokens * (1 + facts.num_tokens / _DOUBLE_COST_TOKENS) / facts.num_bytes


POLICIES: dict[EvictionPolicy, SortKey] = {"lru": lru, "lfu": lfu, "cost": cost}


def policy_of(text: str) -> EvictionPolicy:
    """The policy of that name.

    Raises:
        ValueError: there is none; the message names those that there are.
    """
    for name in POLICIES:
        if name == text:
            return name
    raise ValueError(f"eviction: {text!r}; write one of {', '.join(POLICIES)}")


class Candidates:
    """Runs whose tail may leave, least valuable first; those with a soft-pinned tail after all others.

    Each run stands in the view of all and in those that it was added to. A view is a heap with stale entries: to discard
    is to forget the entry's serial number, the heap drops it when it comes up. Every operation costs O(log n) a view.
    """

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[bool, float, int, BlockRun]]] = {ALL: []}  # view → soft, key, serial, run
        self._live: dict[BlockRun, int] = {}
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, run: BlockRun) -> bool:
        return run in self._live

    def add(self, run: BlockRun, key: float, *, soft: bool = False, views: Iterable[str] = ()) -> None:
        """The run's tail may leave; a second time, with another key."""
        self._next_serial += 1
        self._live[run] = self._next_serial
        for view in (ALL, *views):
            heap = self._heaps.setdefault(view, [])
            heapq.heappush(heap, (soft, key, self._next_serial, run))
            if len(heap) > 2 * len(self._live) + 64:
                self._compact(view)

    def discard(self, run: BlockRun) -> None:
        """The run's tail may not leave (for now)."""
        self._live.pop(run, None)

    def pop(self, view: str = ALL) -> tuple[BlockRun, float] | None:
        """Take out the run of a view whose tail is to leave, with its key; None when nothing may leave."""
        heap = self._heaps.get(view, [])
        while heap:
            _, key, serial, run = heapq.heappop(heap)
            if self._live.get(run) == serial:
                del self._live[run]
                return run, key
        return None

    def drop_view(self, view: str) -> None:
        """No live run stands in this view any more."""
        self._heaps.pop(view, None)

    def _compact(self, view: str) -> None:
        heap = [entry for entry in self._heaps[view] if self._live.get(entry[3]) == entry[2]]
        heapq.heapify(heap)
        self._heaps[view] = heap
