"""Which of many hashes may be in a table: 64 places per hash, looked up for thousands at once in ten microseconds.

A hash that was added passes always; of the others one in 64 or fewer. What was removed passes until the next `rebuild`.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

_PLACES_PER_HASH = 64
_MIN_PLACES = 1 << 12


class Sieve:
    """Of 8-byte hashes as numbers; their lowest bits are the place, which SHA-256 spreads evenly."""

    def __init__(self) -> None:
        self.rebuild(())

    def rebuild(self, keys: Collection[int]) -> None:
        """Let exactly these pass, with room for as many again."""
        num_places = max(_MIN_PLACES, 1 << (2 * _PLACES_PER_HASH * len(keys) - 1).bit_length())
        self._mask = np.uint64(num_places - 1)
        self._taken = np.zeros(num_places, np.bool_)
        self._taken[np.fromiter(keys, np.uint64, len(keys)) & self._mask] = True
        self._num_added = len(keys)

    def add(self, key: int) -> bool:
        """Let a hash pass; False when so many were added that it is time to rebuild."""
        self._taken[key & int(self._mask)] = True
        self._num_added += 1
        return self._num_added * _PLACES_PER_HASH <= len(self._taken)

    def passing(self, keys: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Positions, ascending, of the hashes that may be there."""
        return np.flatnonzero(self._taken[keys & self._mask])
