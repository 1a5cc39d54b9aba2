"""Which blocks of a prompt a transfer speaks of, and which of them one step completes (no engine in here)."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.hashing import HASH_UNIT_TOKENS, NO_HASH, HashChain
from prfaas.types import BlockHash, GroupBlocks, GroupKind


@dataclass(frozen=True)
class GroupShape:
    """What of a KV group decides which blocks a prompt of some length has."""

    kind: GroupKind
    block_tokens: int
    window_tokens: int | None = None


def first_block(shape: GroupShape, num_tokens: int) -> int:
    """The first block that the next token still reads: 0, or where the window at `num_tokens` begins."""
    if shape.kind != "sliding_window" or shape.window_tokens is None:
        return 0
    return max(0, num_tokens - shape.window_tokens + 1) // shape.block_tokens


def group_blocks(chain: HashChain, index: int, shape: GroupShape) -> GroupBlocks:
    """The blocks of group `index` that resuming after the whole chain needs."""
    num_tokens = chain.num_tokens
    if shape.kind == "linear_state":
        parent = chain.at(num_tokens // HASH_UNIT_TOKENS * HASH_UNIT_TOKENS)
        return GroupBlocks(index, 0, (chain.at(num_tokens),), parent)
    first = first_block(shape, num_tokens)
    hashes = chain.blocks(shape.block_tokens, first_block=first, num_tokens=num_tokens)
    return GroupBlocks(index, first, hashes, chain.at(first * shape.block_tokens))


def unhashed(groups: tuple[GroupBlocks, ...]) -> tuple[GroupBlocks, ...]:
    """The same blocks without any prefix claim."""
    return tuple(
        GroupBlocks(g.group, g.first_block, (NO_HASH,) * g.num_blocks, BlockHash(bytes(16))) for g in groups
    )


def num_complete_blocks(shape: GroupShape, blocks: GroupBlocks, *, num_computed: int, num_tokens: int) -> int:
    """How many of `blocks` are whole after `num_computed` of `num_tokens` tokens; the last, partial one only at the end."""
    if num_computed >= num_tokens:
        return blocks.num_blocks
    if shape.kind == "linear_state":
        return 0
    return min(blocks.num_blocks, max(0, num_computed // shape.block_tokens - blocks.first_block))
