"""Blocks and bytes of a prefix in a layout."""

from __future__ import annotations

from dataclasses import replace

from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS, NO_HASH
from prfaas.kv.group import has_states
from prfaas.kv.layout import Layout
from prfaas.types import BlockHash, GroupBlocks, Prefix


def prefix_groups(layout: Layout, prefix: Prefix, *, root: BlockHash = NO_HASH) -> tuple[GroupBlocks, ...]:
    """Return the blocks that a node needs to resume after the prefix; `root` is the parent of the first block.

    As in a transfer, a partial last block is named by its exact length if the model has states. Without states it is
    not part of the prefix.
    """
    hashes, exact_tail = _PrefixHashes(prefix, root), has_states(layout.groups)
    found = (
        group.rules.blocks(group, index, hashes, prefix.num_tokens, exact_tail=exact_tail)
        for index, group in enumerate(layout.groups)
    )
    return tuple(
        replace(blocks, hashes=blocks.hashes[:-1]) if blocks.hashes[-1:] == (NO_HASH,) else blocks for blocks in found
    )


class _PrefixHashes:
    """The hashes that a prefix states, in the form that KV kinds read."""

    def __init__(self, prefix: Prefix, root: BlockHash) -> None:
        self._prefix = prefix
        self._root = root

    def at(self, num_tokens: int) -> BlockHash:
        return self._prefix.end_hash if num_tokens == self._prefix.num_tokens else self._unit_end(num_tokens)

    def blocks(self, block_tokens: int, *, first_block: int, num_tokens: int) -> tuple[BlockHash, ...]:
        num_full = num_tokens // block_tokens
        ends = range((first_block + 1) * block_tokens, (num_full + 1) * block_tokens, block_tokens)
        return (*map(self._unit_end, ends), *((NO_HASH,) if num_tokens % block_tokens else ()))

    def _unit_end(self, num_tokens: int) -> BlockHash:
        end = num_tokens // HASH_UNIT_TOKENS * HASH_BYTES
        return BlockHash(self._prefix.units[end - HASH_BYTES : end]) if end else self._root


def prefix_bytes(layout: Layout, num_tokens: int) -> int:
    """Return the payload of a prefix on one rank, which is what its copy to a node without any of it moves."""
    exact_tail = has_states(layout.groups)
    return sum(
        group.block_bytes * group.rules.num_blocks(group, num_tokens, exact_tail=exact_tail) for group in layout.groups
    )


def is_well_formed(prefix: Prefix) -> bool:
    """Return whether the hashes have the number and length that a prefix of so many tokens needs."""
    has_units = len(prefix.units) == prefix.num_tokens // HASH_UNIT_TOKENS * HASH_BYTES
    return prefix.num_tokens > 0 and has_units and len(prefix.end_hash) == HASH_BYTES
