"""Interface of a KV kind. Its defaults fit attention, whose blocks hold a fixed number of tokens each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

from prfaas.errors import LayoutError
from prfaas.hashing import HASH_UNIT_TOKENS
from prfaas.kv.parts import LayerSlice, Part, attention_parts
from prfaas.types import BlockHash, GroupBlocks, Shard

if TYPE_CHECKING:
    from prfaas.kv.group import KVGroup

ChainKey = tuple[int, BlockHash]  # Group and hash of a prefix block within one arena.


class PromptHashes(Protocol):
    """Hashes of a prompt, such as a `HashChain`."""

    def at(self, num_tokens: int) -> BlockHash:
        """Return the hash of the first `num_tokens` tokens."""

    def blocks(self, block_tokens: int, *, first_block: int, num_tokens: int) -> tuple[BlockHash, ...]:
        """Return the hashes of the blocks from `first_block` up to `num_tokens`, with NO_HASH for a partial last one."""


class KVKind(ABC):
    """Rules of one KV kind. Instances have no state; every method gets the group that it is about."""

    name: ClassVar[str]
    variants: ClassVar[tuple[str, ...]] = ()  # Names of forms that only the planner tells apart.
    is_state: ClassVar[bool] = False  # One state that is valid at exactly one length, instead of blocks of tokens.
    keeps_all_tokens: ClassVar[bool] = False  # Every token attends to all earlier ones.
    has_window: ClassVar[bool] = False  # `window_tokens` says how far a token looks back.

    # Matching

    @abstractmethod
    def first_token(self, group: KVGroup, num_tokens: int) -> int:
        """Return the first token that the token after `num_tokens` attends to."""

    def servable_ends(self, group: KVGroup, blocks: int, num_blocks: int) -> int:
        """Return a bitmap over 0 to `num_blocks`: bit n is set when `blocks` can serve a prefix of n full blocks.

        Only kinds with a window implement it.
        """
        raise NotImplementedError

    # Transfers

    def blocks(
        self, group: KVGroup, index: int, hashes: PromptHashes, num_tokens: int, *, step_tokens: int
    ) -> GroupBlocks:
        """Return what must travel so that an engine can resume after `num_tokens` tokens.

        Later prompts can resume at multiples of `step_tokens`, so the last of these is covered too. With a step of 1 a
        partial last block is named by the hash of its exact length instead of NO_HASH.
        """
        first, size = group.first_kept_block(num_tokens, step_tokens), group.block_tokens
        names = hashes.blocks(size, first_block=first, num_tokens=num_tokens)
        if step_tokens == 1 and num_tokens % size:
            names = (*names[:-1], hashes.at(num_tokens))
        return GroupBlocks(index, first, names, hashes.at(first * size))

    def num_checkpoint_blocks(self, group: KVGroup) -> int:
        """Return the most blocks that a checkpoint takes, in addition to the blocks that a finished prompt leaves anyway."""
        return 0

    # Eviction

    def chain_parent(
        self, group: int, block_hash: BlockHash, before: BlockHash, *, attention_group: int | None
    ) -> ChainKey | None:
        """Return the block that must not leave before this one: the previous block of its chain.

        `attention_group` is the first group that keeps all tokens, if there is one.
        """
        return (group, before) if before != block_hash else None

    # Layout

    def check(self, group: KVGroup, where: str) -> None:
        """Check the parameters of a group.

        Raises:
            LayoutError: a parameter is missing or out of range; the message starts with `where`.
        """
        size, window = group.block_tokens, group.window_tokens
        if not self.is_state and (size <= 0 or size % HASH_UNIT_TOKENS):
            raise LayoutError(f"{where} block_tokens: {size} is not a positive multiple of {HASH_UNIT_TOKENS}")
        if self.has_window != (window is not None) or (window is not None and window <= 0):
            expected = "a positive number" if self.has_window else "none"
            raise LayoutError(f"{where} window_tokens: {window}; {self.name} takes {expected}")

    def parts(
        self, group: KVGroup, layer: LayerSlice, *, shard: Shard, packing: str, first_token: int
    ) -> tuple[Part, ...]:
        """Return the arrays of a layer within a block whose first token is the request's `first_token`.

        Raises:
            LayoutError: the layer's order in its block is not known; the message names it.
        """
        return attention_parts(group.block_tokens, layer, packing=packing, first_token=first_token)

    # Planning

    def max_kept_tokens(self, window_tokens: int | None) -> int | None:
        """Return the most tokens whose KV an engine keeps per sequence; None when there is no limit."""
        return 0 if self.is_state else window_tokens
