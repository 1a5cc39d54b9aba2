"""Blocks that a transfer consists of, and their places in the engine's block tables. Pure.

An engine keeps one block table per request and KV group: a list of block ids. In attention groups, entry j holds tokens
[j·block_tokens, (j+1)·block_tokens). Null blocks fill the positions outside a sliding window. The state of a linear group
is one block. It stands at entry 0, or at the entry of the last token if the engine keeps states at block boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from prfaas.hashing import HASH_UNIT_TOKENS, HashChain
from prfaas.types import GroupBlocks, GroupKind

NULL_BLOCK = 0  # Block id of positions that hold nothing.


@dataclass(frozen=True)
class EngineGroup:
    """KV group as the engine's scheduler sees it. With `kept_states` a state stands at its position, not at entry 0."""

    kind: GroupKind
    block_tokens: int
    window_tokens: int | None = None
    kept_states: bool = False

    def first_block(self, num_tokens: int) -> int:
        """Return the first block that the token after `num_tokens` still attends to."""
        if self.kind != "sliding_window" or self.window_tokens is None:
            return 0
        return max(0, num_tokens - self.window_tokens + 1) // self.block_tokens

    def end_block(self, num_tokens: int, *, computed_tokens: int) -> int:
        """Return the end of the blocks that are final once `computed_tokens` are computed: full blocks, or the tail."""
        if computed_tokens >= num_tokens:
            return -(-num_tokens // self.block_tokens)
        return computed_tokens // self.block_tokens

    def state_entry(self, num_tokens: int) -> int:
        """Return the position in the block table of the state after `num_tokens`."""
        return (num_tokens - 1) // self.block_tokens if self.kept_states else 0

    @property
    def num_checkpoint_blocks(self) -> int:
        """Largest number of blocks of this group in a checkpoint."""
        if self.kind == "sliding_window" and self.window_tokens is not None:
            return -(-(self.window_tokens - 1) // self.block_tokens)
        return int(self.kind == "linear_state")

    def blocks(self, chain: HashChain, index: int, num_tokens: int, *, exact_tail: bool) -> GroupBlocks:
        """Return the block list of a transfer of the first `num_tokens` tokens.

        With `exact_tail` the hash of a partial last block is exact as well.
        """
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
    """Blocks [first, first + len(block_ids)) of one group of a transfer, with the engine blocks that hold them."""

    group: int
    first: int  # Position in the transfer's list of this group.
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class BlockMap:
    """Transferable groups of an engine, in the order of its layout."""

    groups: tuple[EngineGroup, ...]

    @cached_property
    def step_tokens(self) -> int:
        """Distance between lengths at which the blocks of all groups end."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @cached_property
    def checkpoint_spacing_tokens(self) -> int:
        """Smallest distance at which checkpoints take no more blocks than the full attention between them.

        0 means no checkpoints: the engine overwrites its states at the next step.
        """
        if any(group.kind == "linear_state" and not group.kept_states for group in self.groups):
            return 0
        num_blocks = sum(group.num_checkpoint_blocks for group in self.groups)
        full = (group for group in self.groups if group.kind == "full_attention")
        per_step = sum(self.step_tokens // group.block_tokens for group in full)
        return self.step_tokens * -(-num_blocks // max(1, per_step))

    def boundary(self, before_tokens: int, computed_tokens: int) -> int | None:
        """Return the block boundary whose states and windows are in the block tables after a step.

        A step keeps only the state that it ends with, but the windows of any boundary that it passes.
        """
        boundary = computed_tokens // self.step_tokens * self.step_tokens
        has_states = any(group.kind == "linear_state" for group in self.groups)
        is_there = boundary == computed_tokens if has_states else boundary > before_tokens
        return boundary if is_there and boundary else None

    def checkpoint_groups(self, chain: HashChain, boundary: int) -> tuple[GroupBlocks, ...]:
        """Return the block lists of a checkpoint: states and windows. Full attention is stored at the request's end."""
        lists = (group.blocks(chain, index, boundary, exact_tail=False) for index, group in enumerate(self.groups))
        return tuple(
            replace(blocks, hashes=()) if group.kind == "full_attention" else blocks
            for blocks, group in zip(lists, self.groups, strict=True)
        )

    def checkpoint(
        self, tables: Sequence[Sequence[int]], boundary: int, states: Mapping[int, int]
    ) -> tuple[BlockSpan, ...] | None:
        """Return the blocks of a checkpoint, or None if one of them is gone.

        `states` maps linear groups to the blocks with the states at `boundary`. If it is empty, they stand in `tables`.
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
        """Return the block lists of a transfer of `num_tokens` tokens. Both ends compute the same lists.

        With recurrent states a prompt resumes at their exact length, so the partial last block is exact as well.
        """
        exact = any(group.kind == "linear_state" for group in self.groups)
        return tuple(
            group.blocks(chain, index, num_tokens, exact_tail=exact) for index, group in enumerate(self.groups)
        )

    def filled(
        self, tables: Sequence[Sequence[int]], num_tokens: int, *, saved_tokens: int, computed_tokens: int
    ) -> tuple[BlockSpan, ...]:
        """Return the blocks that became final between `saved_tokens` and `computed_tokens`.

        States are final with the last token only. `tables[g]` is the block table of group g. Null blocks are left out.
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
        """Return the blocks that a transfer of `num_tokens` fills in an engine that holds the first `local_tokens`."""
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
    """Return the runs of blocks between null blocks."""
    spans: list[BlockSpan] = []
    run: list[int] = []
    for offset, block_id in enumerate([*block_ids, NULL_BLOCK]):
        if block_id != NULL_BLOCK:
            run.append(block_id)
        elif run:
            spans.append(BlockSpan(group, first + offset - len(run), tuple(run)))
            run = []
    return spans
