"""Pool events: every change of a prefix block of a node, in order."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from prfaas.types import BlockHash

Tier = Literal["memory", "ssd"]


@dataclass(frozen=True)
class BlockStored:
    """A block became a prefix block.

    `block_hash` covers the first `num_tokens` tokens of the chain. `parent` is the hash of the previous block of
    the group, or the root. For a linear state it is the hash of the last full 16-token unit at or before `num_tokens`.
    """

    layout: bytes  # Fingerprint, which covers the shard.
    group: int
    block_hash: BlockHash
    parent: BlockHash
    num_tokens: int
    tier: Tier = "memory"
    num_blocks: ClassVar[int] = 1


@dataclass(frozen=True)
class BlockRemoved:
    """A prefix block left this tier."""

    layout: bytes
    group: int
    block_hash: BlockHash
    tier: Tier = "memory"
    num_blocks: ClassVar[int] = 1


PoolEvent = BlockStored | BlockRemoved


@dataclass(frozen=True)
class BlocksStored:
    """Consecutive blocks of one chain became prefix blocks. `parent` and `num_tokens` describe the first block."""

    layout: bytes
    group: int
    hashes: tuple[BlockHash, ...]
    parent: BlockHash
    num_tokens: int
    block_tokens: int
    tier: Tier = "memory"

    @property
    def num_blocks(self) -> int:
        return len(self.hashes)

    def each(self) -> Iterator[BlockStored]:
        """Yield one event per block."""
        parent = self.parent
        for position, block_hash in enumerate(self.hashes):
            tokens = self.num_tokens + position * self.block_tokens
            yield BlockStored(self.layout, self.group, block_hash, parent, tokens, self.tier)
            parent = block_hash


@dataclass(frozen=True)
class BlocksRemoved:
    """Consecutive blocks of one chain left this tier, in this order."""

    layout: bytes
    group: int
    hashes: tuple[BlockHash, ...]
    tier: Tier = "memory"

    @property
    def num_blocks(self) -> int:
        return len(self.hashes)

    def each(self) -> Iterator[BlockRemoved]:
        """Yield one event per block."""
        return (BlockRemoved(self.layout, self.group, block_hash, self.tier) for block_hash in self.hashes)


PoolChange = BlocksStored | BlocksRemoved
