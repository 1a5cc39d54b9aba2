"""What a node announces of its pool: every change of a prefix block, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prfaas.types import BlockHash

Tier = Literal["gpu", "memory", "ssd"]


@dataclass(frozen=True)
class BlockStored:
    """A block became a prefix block.

    `block_hash` covers the first `num_tokens` tokens of its chain. `parent` is the hash one block of the same group earlier
    (the root for the first one); of a linear state it is the hash of the last full 16-token unit at or before `num_tokens`.
    """

    layout: bytes  # fingerprint, which includes the shard
    group: int
    block_hash: BlockHash
    parent: BlockHash
    num_tokens: int
    tier: Tier = "memory"


@dataclass(frozen=True)
class BlockRemoved:
    """A prefix block is gone from this tier."""

    layout: bytes
    group: int
    block_hash: BlockHash
    tier: Tier = "memory"


PoolEvent = BlockStored | BlockRemoved
