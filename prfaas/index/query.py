"""A prompt's hashes at one block size, laid out for look-ups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prfaas.errors import IndexRefusal
from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS
from prfaas.kv.match import CutReason, PrefixMatch
from prfaas.types import AgentName, BlockHash, ClusterName


class Chain(NamedTuple):
    """A prompt's blocks: their hashes joined, and the 8-byte beginnings as numbers, one after the other in memory."""

    hashes: bytes
    tails: NDArray[np.uint64]


def chain_of(units: bytes, block_tokens: int) -> Chain:
    """A prompt's full blocks, from the hashes of its 16-token units."""
    per_block = block_tokens // HASH_UNIT_TOKENS
    if per_block > 1:
        units = np.frombuffer(units, f"V{HASH_BYTES}")[per_block - 1 :: per_block].tobytes()
    return Chain(units, np.frombuffer(units, np.uint64)[::2].copy())


@dataclass(frozen=True)
class Query:
    """How much of a prompt is cached where?

    `units` are the hashes of its full 16-token units, joined. `checkpoints` are (length, hash) of further lengths to
    look at, such as the whole prompt without its last token, or where an earlier turn of the conversation ended.
    """

    model: str
    units: bytes
    limit_tokens: int  # the longest prefix of use: the prompt without its last token
    checkpoints: tuple[tuple[int, BlockHash], ...] = ()
    with_world: bool = False  # ask for what all clusters can serve together as well

    def check(self) -> None:
        """Raises:
        IndexRefusal: the hashes are not what `prfaas.hashing` makes of that many tokens.
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
    """What one node can serve of the prompt, from what its pool holds."""

    node: AgentName
    cluster: ClusterName
    usable_tokens: int  # all KV groups together
    attention_tokens: int  # full-attention groups alone: what need not travel there
    reason: CutReason


class ClusterMatch(NamedTuple):
    """What the nodes of one cluster can serve together, blocks spread over them."""

    cluster: ClusterName
    usable_tokens: int
    attention_tokens: int
    reason: CutReason


@dataclass(frozen=True)
class MatchResult:
    """`nodes` and `clusters` with anything of the prompt, best first; `world`, where it is asked for, is what the nodes of all
    clusters can serve together.

    `odd_lengths` are lengths beyond every answer at which a checkpoint hangs on this prompt's units, whose hash the
    query did not state: who has the tokens hashes them (`HashChain.at`) and asks again with these `checkpoints`.
    """

    nodes: tuple[NodeMatch, ...]
    clusters: tuple[ClusterMatch, ...]
    odd_lengths: tuple[int, ...] = ()
    world: PrefixMatch | None = None
