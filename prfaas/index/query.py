"""Queries to the index and their results: a prompt's hashes in, matches of nodes out."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prfaas.errors import IndexRefusal
from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS
from prfaas.kv.match import CutReason
from prfaas.types import AgentName, BlockHash, ClusterName


class Chain(NamedTuple):
    """A prompt's blocks: their hashes joined, and their 8-byte beginnings as numbers in contiguous memory."""

    hashes: bytes
    tails: NDArray[np.uint64]


def chain_of(units: bytes, block_tokens: int) -> Chain:
    """Return a prompt's full blocks, from the hashes of its 16-token units."""
    per_block = block_tokens // HASH_UNIT_TOKENS
    if per_block > 1:
        units = np.frombuffer(units, f"V{HASH_BYTES}")[per_block - 1 :: per_block].tobytes()
    return Chain(units, np.frombuffer(units, np.uint64)[::2].copy())


@dataclass(frozen=True)
class Query:
    """Question where a prompt is cached.

    `units` are the hashes of its full 16-token units, joined. `checkpoints` are (length, hash) of further lengths, such
    as the whole prompt without its last token, or the end of an earlier turn of the conversation.
    """

    model: str
    units: bytes
    limit_tokens: int  # Longest useful prefix: the prompt without its last token.
    checkpoints: tuple[tuple[int, BlockHash], ...] = ()

    def check(self) -> None:
        """Check the hashes.

        Raises:
            IndexRefusal: `prfaas.hashing` does not produce such hashes for that many tokens.
        """
        if len(self.units) % HASH_BYTES or self.limit_tokens < 0:
            raise IndexRefusal(
                "alien_hash", f"{len(self.units)} bytes of unit hashes; a unit hash has {HASH_BYTES} bytes"
            )
        if self.limit_tokens > (len(self.units) // HASH_BYTES + 1) * HASH_UNIT_TOKENS:
            raise IndexRefusal(
                "alien_hash", f"{self.limit_tokens} tokens have more units than {len(self.units) // HASH_BYTES}"
            )
        for length, block_hash in self.checkpoints:
            if length <= 0 or len(block_hash) != HASH_BYTES:
                raise IndexRefusal(
                    "alien_hash", f"checkpoint at {length}: a positive length and {HASH_BYTES} bytes of hash"
                )


class NodeMatch(NamedTuple):
    """Prefix match of one node, from its pool."""

    node: AgentName
    cluster: ClusterName
    usable_tokens: int  # All KV groups together.
    attention_tokens: int  # Full-attention groups alone: the tokens whose KV need not travel there.
    reason: CutReason


@dataclass(frozen=True)
class MatchResult:
    """Nodes that hold anything of the prompt, best first.

    `odd_lengths` are longer lengths at which a checkpoint depends on this prompt's units, but whose hash the query did
    not state. The caller that has the tokens hashes them (`HashChain.at`) and asks again with these `checkpoints`.
    """

    nodes: tuple[NodeMatch, ...]
    odd_lengths: tuple[int, ...] = ()
