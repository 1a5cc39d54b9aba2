"""Plain data that crosses packages: ids, shards, the block lists of a transfer, prefixes that are copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NewType

TransferId = NewType("TransferId", bytes)  # 16 random bytes, chosen by whoever signs the grant
BlockHash = NewType("BlockHash", bytes)  # 16 bytes, see hashing.py
InstanceId = NewType("InstanceId", str)  # one scheduler of one engine
AgentName = NewType("AgentName", str)  # one node
ClusterName = NewType("ClusterName", str)

TRANSFER_ID_BYTES = 16

GroupKind = Literal["full_attention", "sliding_window", "linear_state"]
InstanceRole = Literal["prefill", "decode", "both"]
ClusterKind = Literal["prfaas", "pd"]

# Why a transfer ended without its data: on the wire, to the engine, in logs, as a metric's label.
FailureReason = Literal[
    "grant_refused",  # forged, expired, or not for this agent
    "no_layout",  # no worker of this instance has registered
    "no_memory",  # no slots left for transfer blocks
    "unreachable",  # the other agent does not answer
    "layout_mismatch",  # the two sides lay their KV out differently
    "evicted",  # a block that was to be held is gone
    "prompt_mismatch",  # an engine's prompt is not the one that was granted
    "incomplete",  # the sender's request ended before all its layers came
    "cancelled",  # either side gave up
    "deadline",  # it did not end in time
    "checksum",  # a chunk arrived changed, again and again
    "protocol",  # the other agent broke the protocol
    "shutdown",  # an agent stopped
]


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size` tensor-parallel ranks."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class GroupBlocks:
    """The blocks of one KV group that a transfer or a query speaks of.

    `hashes[i]` names block `first_block + i` of the request; `hashing.NO_HASH` marks a block that is not
    full and so is no prefix block. A linear state is one block whose hash covers exactly the transferred tokens.
    `parent` is the hash of the block before the first one (the root when there is none); of a linear state it is the
    hash of the last full 16-token unit at or before its length.
    """

    group: int
    first_block: int
    hashes: tuple[BlockHash, ...]
    parent: BlockHash = BlockHash(bytes(16))

    @property
    def num_blocks(self) -> int:
        return len(self.hashes)


# How a commanded copy, or an order for a pool, ended; `pinned`: a soft pin of what is pinned would be less than that.
CopyOutcome = Literal["completed", "pinned"] | FailureReason


@dataclass(frozen=True)
class Prefix:
    """The first `num_tokens` tokens of a prompt. `units` are the hashes of its full 16-token units, joined."""

    model: str
    units: bytes
    num_tokens: int
    end_hash: BlockHash  # of exactly num_tokens tokens


@dataclass(frozen=True)
class CopyCommand:
    """A manager wants this node to send what the grant's destination lacks of a prefix."""

    transfer_id: TransferId
    grant: bytes
    prefix: Prefix
    priority: int


PoolOrder = Literal[
    "pin",  # never leaves, until it is unpinned
    "soft_pin",  # leaves when nothing else can
    "unpin",
    "remove",  # leaves now, as far as nobody uses it
]


@dataclass(frozen=True)
class PoolCommand:
    """An operator wants this node to keep, or not to keep, the prefix that ends with a hash."""

    command_id: TransferId
    end_hash: BlockHash
    order: PoolOrder


@dataclass(frozen=True)
class ProbeCommand:
    """A manager wants this node to find out what the link to the grant's destination carries."""

    transfer_id: TransferId
    grant: bytes


TransferPhase = Literal[
    "queue",  # of the sending engine: from its request until the first layer is there
    "prefill",  # from the first layer until the last forward pass has ended
    "wire",  # from then until the receiver has acknowledged everything
    "load",  # from everything in the receiver's memory until its engine has read it
]


@dataclass(frozen=True)
class TransferTiming:
    """Seconds of the phases of one transfer that one of its two agents has seen: the sender three, the receiver one."""

    transfer_id: TransferId
    seconds: Mapping[TransferPhase, float]


@dataclass(frozen=True)
class CopyEnd:
    """How a command ended. Bytes are payload; of a `PoolCommand` moved is what left the pool, held what it is about."""

    transfer_id: TransferId
    outcome: CopyOutcome
    message: str = ""
    moved_bytes: int = 0
    held_bytes: int = 0
