"""Which blocks of a layout a prefix consists of, and how many bytes they have (pure)."""

from __future__ import annotations

from prfaas.cachepool.layout import KVGroup, Layout
from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS, NO_HASH
from prfaas.types import BlockHash, GroupBlocks, Prefix


def prefix_groups(layout: Layout, prefix: Prefix, *, root: BlockHash = NO_HASH) -> tuple[GroupBlocks, ...]:
    """What a node needs to resume after the prefix: attention blocks, window blocks, the state of exactly its length.

    `root` is the parent of the first block. As in a transfer, a partial last block is named by its exact length where the
    model has linear states, and is not part of the prefix where it has none.
    """
    exact_tail = _has_states(layout)
    return tuple(
        _group_blocks(group, index, prefix, root=root, exact_tail=exact_tail)
        for index, group in enumerate(layout.groups)
    )


def _has_states(layout: Layout) -> bool:
    return any(group.kind == "linear_state" for group in layout.groups)


def _group_blocks(group: KVGroup, index: int, prefix: Prefix, *, root: BlockHash, exact_tail: bool) -> GroupBlocks:
    length = prefix.num_tokens
    if group.kind == "linear_state":
        return GroupBlocks(index, 0, (prefix.end_hash,), _hash_at(prefix, length // HASH_UNIT_TOKENS, root))
    per_block = group.block_tokens // HASH_UNIT_TOKENS
    first, num_full = first_block(group, length), length // group.block_tokens
    hashes = [_hash_at(prefix, end * per_block, root) for end in range(first + 1, num_full + 1)]
    if exact_tail and length % group.block_tokens:
        hashes.append(prefix.end_hash)
    return GroupBlocks(index, first, tuple(hashes), _hash_at(prefix, first * per_block, root))


def first_block(group: KVGroup, num_tokens: int) -> int:
    """The first block of a group that the token after `num_tokens` still attends to."""
    if group.kind != "sliding_window" or group.window_tokens is None:
        return 0
    return max(0, num_tokens - group.window_tokens + 1) // group.block_tokens


def _hash_at(prefix: Prefix, num_units: int, root: BlockHash) -> BlockHash:
    """The hash of the first `num_units` full units."""
    return BlockHash(prefix.units[(num_units - 1) * HASH_BYTES : num_units * HASH_BYTES]) if num_units else root


def prefix_bytes(layout: Layout, num_tokens: int) -> int:
    """Payload of a prefix of so many tokens on one rank: what its copy to a node that has nothing of it moves."""
    exact_tail = _has_states(layout)
    return sum(group.block_bytes * _num_blocks(group, num_tokens, exact_tail=exact_tail) for group in layout.groups)


def _num_blocks(group: KVGroup, num_tokens: int, *, exact_tail: bool) -> int:
    """How many blocks `prefix_groups` names of a group."""
    if group.kind == "linear_state":
        return 1
    ends = -(-num_tokens // group.block_tokens) if exact_tail else num_tokens // group.block_tokens
    return max(0, ends - first_block(group, num_tokens))


def is_well_formed(prefix: Prefix) -> bool:
    """Whether the hashes are as many and as long as a prefix of that length has."""
    has_units = len(prefix.units) == prefix.num_tokens // HASH_UNIT_TOKENS * HASH_BYTES
    return prefix.num_tokens > 0 and has_units and len(prefix.end_hash) == HASH_BYTES
