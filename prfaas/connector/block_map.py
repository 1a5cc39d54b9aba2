"""Which blocks of a request a transfer consists of, and where each stands in the engine's block tables (pure).

Per KV group an engine keeps one list of block ids per request. Attention groups index it by position: entry j holds
tokens [j·block_tokens, (j+1)·block_tokens), null blocks standing for those outside a sliding window. The state of a
linear group is one block: entry 0, or, where the engine keeps states at block boundaries, the entry of the last token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from prfaas.hashing import HASH_UNIT_TOKENS, HashChain
from prfaas.types import GroupBlocks, GroupKind

NULL_BLOCK = 0  # the block id of positions that hold nothing


@dataclass(frozen=True)
class EngineGroup:
    """One KV group as the engine's scheduler sees it. `kept_states`: a state stands at its position, not at entry 0."""

    kind: GroupKind
    block_tokens: int
    window_tokens: int | None = None
    kept_states: bool = False

    def first_block(self, num_tokens: int) -> int:
        """The first block that the token after `num_tokens` still attends to."""
        if self.kind != "sliding_window" or self.window_tokens is None:
            return 0
        return max(0, num_tokens - self.window_tokens + 1) // self.block_tokens

    def end_block(self, num_tokens: int, *, computed_tokens: int) -> int:
        """One past the last block that is final (full, or the tail) once `computed_tokens` are computed."""
        if computed_tokens >= num_tokens:
            return -(-num_tokens // self.block_tokens)
        return computed_tokens // self.block_tokens

    def state_entry(self, num_tokens: int) -> int:
        """Where the state after `num_tokens` stands in the block table."""
        return (num_tokens - 1) // self.block_tokens if self.kept_states else 0

    @property
    def num_checkpoint_blocks(self) -> int:
        """How many blocks of this group a checkpoint holds at most."""
        if self.kind == "sliding_window" and self.window_tokens is not None:
            return -(-(self.window_tokens - 1) // self.block_tokens)
        return int(self.kind == "linear_state")

    def blocks(self, chain: HashChain, index: int, num_tokens: int, *, exact_tail: bool) -> GroupBlocks:
        """What a transfer of the first `num_tokens` tokens says of this group; `exact_tail` names a partial last block too."""
        if self.kind == "linear_state":
            parent = chain.at(num_tokens // HASH_UNIT_TOKENS * HASH_UNIT_TOKENS)
            return GroupBlocks(index, 0, (chain.at(num_tokens),), parent)
        first = self.first_block(num_tokens)
        hashes = chain.blocks(self.block_tokens, first_block=first, num_tokens=num_tokens)
        if exact_tail and num_tokens % self.block_tokens:
            hashes = (*hashes[:-1], chain.at(num_tokens))
        return GroupBlocks(index, first, hashes, chain.at(first * self.block_tokens))


@dataclass(frozen=True)
class BlockSpan:
    """Blocks [first, first + len(block_ids)) of one group of a transfer, and the engine blocks that hold them."""

    group: int
    first: int  # counted within the transfer's list of this group
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class BlockMap:
    """All transferable groups of an engine, in the order of its layout."""

    groups: tuple[EngineGroup, ...]

    @cached_property
    def step_tokens(self) -> int:
        """At multiples of this all groups' blocks end."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @cached_property
    def checkpoint_spacing_tokens(self) -> int:
        """The least distance between two checkpoints at which they take no more blocks than the full attention between them.

        0 where there are none: full attention needs no checkpoints, and a state that the next step overwrites can be none.
        """
        if any(group.kind == "linear_state" and not group.kept_states for group in self.groups):
            return 0
        num_blocks = sum(group.num_checkpoint_blocks for group in self.groups)
        full = (group for group in self.groups if group.kind == "full_attention")
        per_step = sum(self.step_tokens // group.block_tokens for group in full)
        return self.step_tokens * -(-num_blocks // max(1, per_step))

    def boundary(self, before_tokens: int, computed_tokens: int) -> int | None:
        """The block boundary whose state and windows stand in the block tables of a step over these tokens.

        A step keeps one state, the one that it ends with; windows of any boundary that it passes.
        """
        boundary = computed_tokens // self.step_tokens * self.step_tokens
        has_states = any(group.kind == "linear_state" for group in self.groups)
        is_there = boundary == computed_tokens if has_states else boundary > before_tokens
        return boundary if is_there and boundary else None

    def checkpoint_groups(self, chain: HashChain, boundary: int) -> tuple[GroupBlocks, ...]:
        """The block lists of a checkpoint: states and windows; full attention is left at the request's end."""
        groups = (group.blocks(chain, index, boundary, exact_tail=False) for index, group in enumerate(self.groups))
        kinds = (group.kind for group in self.groups)
        return tuple(
            replace(its, hashes=()) if kind == "full_attention" else its
            for its, kind in zip(groups, kinds, strict=True)
        )

    def checkpoint(
        self, tables: Sequence[Sequence[int]], boundary: int, states: Mapping[int, int]
    ) -> tuple[BlockSpan, ...] | None:
        """The blocks of a checkpoint, None where one is not there any more.

        `states`: by linear group, where the engine keeps the states at `boundary`, when not at their place in `tables`.
        """
        spans = []
        for index, group in enumerate(self.groups):
            if group.kind == "full_attention":
                continue
            if group.kind == "linear_state":
                entry, num_blocks = group.state_entry(boundary), 1
                found = [states.get(index, NULL_BLOCK)] if states else list(tables[index][entry : entry + 1])
            else:
                first, end = group.first_block(boundary), boundary // group.block_tokens
                found, num_blocks = list(tables[index][first:end]), end - first
            if len(found) < num_blocks or NULL_BLOCK in found:
                return None
            spans.append(BlockSpan(index, 0, tuple(found)))
        return tuple(spans)

    def transfer_groups(self, chain: HashChain, num_tokens: int) -> tuple[GroupBlocks, ...]:
        """The block lists of a transfer of `num_tokens` tokens; both ends compute the same ones.

        Where there are recurrent states a prompt is resumed at the exact length of one, so its partial last block is of use.
        """
        exact = any(group.kind == "linear_state" for group in self.groups)
        return tuple(
            group.blocks(chain, index, num_tokens, exact_tail=exact) for index, group in enumerate(self.groups)
        )

    def filled(
        self, tables: Sequence[Sequence[int]], num_tokens: int, *, saved_tokens: int, computed_tokens: int
    ) -> tuple[BlockSpan, ...]:
        """The blocks that became final between `saved_tokens` and `computed_tokens`; states only with the last token.

        `tables[g]` is the request's list of block ids in group g. Null blocks are left out.
        """
        spans = []
        for index, group in enumerate(self.groups):
            table = tables[index]
            if group.kind == "linear_state":
                if saved_tokens < num_tokens <= computed_tokens:
                    spans.append(BlockSpan(index, 0, (table[group.state_entry(num_tokens)],)))
                continue
            first = group.first_block(num_tokens)
            start = max(first, group.end_block(num_tokens, computed_tokens=saved_tokens))
            end = group.end_block(num_tokens, computed_tokens=computed_tokens)
            spans += _without_nulls(index, start - first, table[start:end])
        return tuple(spans)

    def missing(self, tables: Sequence[Sequence[int]], num_tokens: int, *, local_tokens: int) -> tuple[BlockSpan, ...]:
        """The blocks that a transfer of `num_tokens` fills in an engine which holds the first `local_tokens` itself."""
        spans = []
        for index, group in enumerate(self.groups):
            table = tables[index]
            if group.kind == "linear_state":
                spans.append(BlockSpan(index, 0, (table[group.state_entry(num_tokens)],)))
                continue
            first = group.first_block(num_tokens)
            start = max(first, local_tokens // group.block_tokens)
            end = group.end_block(num_tokens, computed_tokens=num_tokens)
            spans += _without_nulls(index, start - first, table[start:end])
        return tuple(spans)


def _without_nulls(group: int, first: int, block_ids: Sequence[int]) -> list[BlockSpan]:
    """The runs between null blocks."""
    spans: list[BlockSpan] = []
    run: list[int] = []
    for offset, block_id in enumerate([*block_ids, NULL_BLOCK]):
        if block_id != NULL_BLOCK:
            run.append(block_id)
        elif run:
            spans.append(BlockSpan(group, first + offset - len(run), tuple(run)))
            run = []
    return spans
