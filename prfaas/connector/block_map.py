"""Blocks that a transfer consists of, and their places in the engine's block tables. Pure.

An engine keeps one block table per request and KV group: a list of block ids. In attention groups, entry j holds tokens
[j·block_tokens, (j+1)·block_tokens). Null blocks fill the positions outside a sliding window. The state of a linear group
is one block. It stands at entry 0, or at the entry of the last token if the engine keeps states at block boundaries.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from prfaas.hashing import HashChain
from prfaas.kv.group import KVGroup, has_states, resume_step_tokens
from prfaas.types import GroupBlocks

NULL_BLOCK = 0  # Block id of positions that hold nothing.


@dataclass(frozen=True)
class BlockSpan:
    """Blocks [first, first + len(block_ids)) of one group of a transfer, with the engine blocks that hold them."""

    group: int
    first: int  # Position in the transfer's list of this group.
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class BlockMap:
    """Transferable groups of an engine, in the order of its layout."""

    groups: tuple[KVGroup, ...]

    @cached_property
    def step_tokens(self) -> int:
        """Distance between lengths at which the blocks of all groups end."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @cached_property
    def _resume_step_tokens(self) -> int:
        return resume_step_tokens(self.groups)

    @cached_property
    def checkpoint_spacing_tokens(self) -> int:
        """Smallest distance at which checkpoints take no more blocks than the full attention between them.

        0 means no checkpoints: the engine overwrites its states at the next step.
        """
        if any(group.is_state and not group.kept_states for group in self.groups):
            return 0
        num_blocks = sum(group.rules.num_checkpoint_blocks(group) for group in self.groups)
        full = (group for group in self.groups if group.keeps_all_tokens)
        per_step = sum(self.step_tokens // group.block_tokens for group in full)
        return self.step_tokens * -(-num_blocks // max(1, per_step))

    def boundary(self, before_tokens: int, computed_tokens: int) -> int | None:
        """Return the block boundary whose states and windows are in the block tables after a step.

        A step keeps only the state that it ends with, but the windows of any boundary that it passes.
        """
        boundary = computed_tokens // self.step_tokens * self.step_tokens
        is_there = boundary == computed_tokens if has_states(self.groups) else boundary > before_tokens
        return boundary if is_there and boundary else None

    def checkpoint_groups(self, chain: HashChain, boundary: int) -> tuple[GroupBlocks, ...]:
        """Return the block lists of a checkpoint: states and windows. Full attention is stored at the request's end."""
        lists = self.transfer_groups(chain, boundary)
        return tuple(
            replace(blocks, hashes=()) if group.keeps_all_tokens else blocks
            for blocks, group in zip(lists, self.groups, strict=True)
        )

    def checkpoint(
        self, tables: Sequence[Sequence[int]], boundary: int, states: Mapping[int, int]
    ) -> tuple[BlockSpan, ...] | None:
        """Return the blocks of a checkpoint, or None if one of them was removed.

        `states` maps linear groups to the blocks with the states at `boundary`. If it is empty, they stand in `tables`.
        """
        spans = []
        for index, group in enumerate(self.groups):
            if group.keeps_all_tokens:
                continue
            if group.is_state:
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
        step_tokens = self._resume_step_tokens
        return tuple(
            group.rules.blocks(group, index, chain, num_tokens, step_tokens=step_tokens)
            for index, group in enumerate(self.groups)
        )

    def filled(
        self, tables: Sequence[Sequence[int]], num_tokens: int, *, saved_tokens: int, computed_tokens: int
    ) -> tuple[BlockSpan, ...]:
        """Return the blocks of a transfer that became final between `saved_tokens` and `computed_tokens`.

        An engine that holds the first `saved_tokens` loads the same blocks. States are final with the last token only.
        `tables[g]` is the block table of group g. Null blocks are left out.
        """
        spans = []
        for index, group in enumerate(self.groups):
            table = tables[index]
            if group.is_state:
                if saved_tokens < num_tokens <= computed_tokens:
                    spans.append(BlockSpan(index, 0, (table[group.state_entry(num_tokens)],)))
                continue
            first = group.first_kept_block(num_tokens, self._resume_step_tokens)
            start = max(first, _end_block(group, num_tokens, computed_tokens=saved_tokens))
            end = _end_block(group, num_tokens, computed_tokens=computed_tokens)
            spans += _without_nulls(index, start - first, table[start:end])
        return tuple(spans)


def _end_block(group: KVGroup, num_tokens: int, *, computed_tokens: int) -> int:
    """Return the end of the blocks that are final (full, or the tail) once `computed_tokens` are computed."""
    if computed_tokens >= num_tokens:
        return -(-num_tokens // group.block_tokens)
    return computed_tokens // group.block_tokens


def _without_nulls(group: int, first: int, block_ids: Sequence[int]) -> list[BlockSpan]:
    """Return the runs of blocks between null blocks."""
    spans = []
    for is_null, run in groupby(block_ids, lambda block_id: block_id == NULL_BLOCK):
        ids = tuple(run)
        if not is_null:
            spans.append(BlockSpan(group, first, ids))
        first += len(ids)
    return spans
