"""What leaves with a prefix: its blocks in every KV group, on every rank and in every tier (pure).

All tables are looked at together, since each knows a part of a chain alone: a sliding window's blocks begin far into the
prefix, blocks of another size end elsewhere, and what a block in memory hangs on may be on the SSD only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from prfaas.cachepool.block_run import BlockRun
from prfaas.cachepool.slots import SlotTable
from prfaas.types import BlockHash


class RunCut(NamedTuple):
    """A run is to be shortened to its first blocks."""

    slots: SlotTable
    run: BlockRun
    num_left: int


def removal(tables: Sequence[SlotTable], end_hash: BlockHash) -> list[RunCut]:
    """The runs to be shortened, in this order, for the prefix that ends with a hash to leave, with what follows it. O(slots).

    What stays of the prefix is all of it, in every group, up to where the last other chain branches off or a linear state
    stands before its end.
    """
    chains = _Chains(tables)
    path = chains.path(end_hash)
    if end_hash not in path:
        return []
    followers = chains.beyond([end_hash], path[end_hash] - 1)
    own = {block_hash for cut in followers for block_hash in cut.run.hashes[cut.num_left :]} | path.keys()
    kept_tokens = max(
        (tokens for its, tokens in path.items() if its != end_hash and chains.branches(its, own)), default=0
    )
    cuts = chains.beyond([its for its, tokens in path.items() if tokens > kept_tokens], kept_tokens)
    return sorted(cuts, key=lambda cut: (cut.run.num_tokens, cut.slots.is_state(cut.run.group)), reverse=True)


class _Chains:
    """The runs of all tables, by what they hang on."""

    def __init__(self, tables: Sequence[SlotTable]) -> None:
        self._tables = tables
        self._hung: dict[BlockHash, list[tuple[SlotTable, BlockRun]]] = {}
        for slots in tables:
            for run in slots.runs():
                if run.above is not None:
                    self._hung.setdefault(run.above[1], []).append((slots, run))

    def _with(self, block_hash: BlockHash) -> Iterator[tuple[SlotTable, BlockRun]]:
        for slots in self._tables:
            for group in range(len(slots.by_hash)):
                run = slots.run_with((group, block_hash))
                if run is not None:
                    yield slots, run

    def path(self, end_hash: BlockHash) -> dict[BlockHash, int]:
        """The hashes of a prefix at which some block ends or begins, with their lengths in tokens; its own where it is here."""
        path: dict[BlockHash, int] = {}
        walked: dict[BlockRun, int] = {}  # → how many of its blocks
        walk = [end_hash]
        for block_hash in walk:  # grows as it is walked
            for _, run in self._with(block_hash):
                start, end = walked.get(run, 0), run.position_of(block_hash) + 1
                walked[run] = max(start, end)
                before = [] if start or run.above is None else [(run.above[1], run.tokens_above)]
                for its, tokens in [*before, *((run.hashes[at], run.tokens_at(at)) for at in range(start, end))]:
                    if its not in path:
                        path[its] = tokens
                        walk.append(its)
        return path

    def beyond(self, starts: Iterable[BlockHash], num_tokens: int) -> list[RunCut]:
        """All blocks that end further than `num_tokens` on chains that go through one of these hashes, which do so too."""
        walk = list(starts)
        reached, cuts = set(walk), dict[BlockRun, RunCut]()
        for block_hash in walk:  # grows as it is walked
            for slots, run in [*self._with(block_hash), *self._hung.get(block_hash, ())]:
                if run in cuts:
                    continue
                first = next((at for at in range(len(run)) if run.tokens_at(at) > num_tokens), len(run))
                cuts[run] = RunCut(slots, run, first)
                near = run.hashes[first:]
                if run.above is not None and run.tokens_above > num_tokens:
                    near = [run.above[1], *near]
                new = [its for its in near if its not in reached]
                reached.update(new)
                walk += new
        return list(cuts.values())

    def branches(self, block_hash: BlockHash, own: set[BlockHash]) -> bool:
        """Whether a state stands at a hash, or a block that is not among `own` follows it."""
        for slots, run in self._with(block_hash):
            following = run.position_of(block_hash) + 1
            if slots.is_state(run.group) or (following < len(run) and run.hashes[following] not in own):
                return True
        return any(run.hashes[0] not in own for _, run in self._hung.get(block_hash, ()))
