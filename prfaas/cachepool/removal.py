"""Removal of a prefix: its blocks in every KV group, on every rank and in every tier.

Each table knows only a part of a chain: a sliding window's blocks begin far into the prefix, blocks of another size end
elsewhere, and the parent of a block in memory may be on the SSD only. So all tables are searched together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from prfaas.cachepool.block_run import BlockRun
from prfaas.cachepool.slots import SlotTable
from prfaas.types import BlockHash


class RunCut(NamedTuple):
    """Order to shorten a run to its first `num_left` blocks."""

    slots: SlotTable
    run: BlockRun
    num_left: int


def removal(tables: Sequence[SlotTable], end_hash: BlockHash) -> list[RunCut]:
    """Return the cuts, in order, that remove the prefix that ends with a hash, and everything that follows it. O(slots).

    The prefix stays, in every group, up to the last point where another chain branches off or a linear state stands.
    """
    chains = _Chains(tables)
    path = chains.path(end_hash)
    if end_hash not in path:
        return []
    followers = chains.beyond([end_hash], path[end_hash] - 1)
    own = {block_hash for cut in followers for block_hash in cut.run.hashes[cut.num_left :]} | path.keys()
    branches = (tokens for key, tokens in path.items() if key != end_hash and chains.has_branch(key, own))
    kept_tokens = max(branches, default=0)
    cuts = chains.beyond([key for key, tokens in path.items() if tokens > kept_tokens], kept_tokens)
    return sorted(cuts, key=lambda cut: (cut.run.num_tokens, cut.slots.is_state(cut.run.group)), reverse=True)


class _Chains:
    """The runs of all tables, by the hash that they depend on."""

    def __init__(self, tables: Sequence[SlotTable]) -> None:
        self._tables = tables
        self._children: dict[BlockHash, list[tuple[SlotTable, BlockRun]]] = {}
        for slots in tables:
            for run in slots.runs():
                if run.above is not None:
                    self._children.setdefault(run.above[1], []).append((slots, run))

    def _runs_with(self, block_hash: BlockHash) -> Iterator[tuple[SlotTable, BlockRun]]:
        for slots in self._tables:
            for group in range(len(slots.by_hash)):
                run = slots.run_with((group, block_hash))
                if run is not None:
                    yield slots, run

    def path(self, end_hash: BlockHash) -> dict[BlockHash, int]:
        """Return the hashes at which blocks of a prefix begin or end, with their lengths in tokens."""
        path: dict[BlockHash, int] = {}
        num_walked: dict[BlockRun, int] = {}
        queue = [end_hash]
        for block_hash in queue:  # The queue grows meanwhile.
            for _, run in self._runs_with(block_hash):
                start, end = num_walked.get(run, 0), run.position_of(block_hash) + 1
                num_walked[run] = max(start, end)
                before = [] if start or run.above is None else [(run.above[1], run.tokens_above)]
                for key, tokens in [*before, *((run.hashes[at], run.tokens_at(at)) for at in range(start, end))]:
                    if key not in path:
                        path[key] = tokens
                        queue.append(key)
        return path

    def beyond(self, starts: Iterable[BlockHash], num_tokens: int) -> list[RunCut]:
        """Return cuts of all blocks that end beyond `num_tokens`, on chains through hashes that end there as well."""
        queue = list(starts)
        reached, cuts = set(queue), dict[BlockRun, RunCut]()
        for block_hash in queue:  # The queue grows meanwhile.
            for slots, run in [*self._runs_with(block_hash), *self._children.get(block_hash, ())]:
                if run in cuts:
                    continue
                first = next((at for at in range(len(run)) if run.tokens_at(at) > num_tokens), len(run))
                cuts[run] = RunCut(slots, run, first)
                near = run.hashes[first:]
                if run.above is not None and run.tokens_above > num_tokens:
                    near = [run.above[1], *near]
                new = [key for key in near if key not in reached]
                reached.update(new)
                queue += new
        return list(cuts.values())

    def has_branch(self, block_hash: BlockHash, own: set[BlockHash]) -> bool:
        """Return whether a state is stored at a hash, or a block outside `own` follows it."""
        for slots, run in self._runs_with(block_hash):
            following = run.position_of(block_hash) + 1
            if slots.is_state(run.group) or (following < len(run) and run.hashes[following] not in own):
                return True
        return any(run.hashes[0] not in own for _, run in self._children.get(block_hash, ()))
