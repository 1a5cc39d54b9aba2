"""A prompt's hashes at one block size, laid out for look-ups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS


@dataclass(frozen=True)
class Chain:
    """A prompt's blocks: their hashes joined, and the 8-byte beginnings joined."""

    hashes: bytes
    tails: bytes


def chain_of(units: bytes, block_tokens: int) -> Chain:
    """A prompt's full blocks, from the hashes of its 16-token units."""
    per_block = block_tokens // HASH_UNIT_TOKENS
    if per_block > 1:
        units = np.frombuffer(units, f"V{HASH_BYTES}")[per_block - 1 :: per_block].tobytes()
    return Chain(units, np.frombuffer(units, np.uint64)[::2].tobytes())
