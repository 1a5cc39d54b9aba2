"""A prompt's hashes at one block size, laid out for look-ups."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS


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
