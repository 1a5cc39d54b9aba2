"""Which of many hashes may be in a table: 16 bytes per hash or a few more, thousands looked up at once.

A hash that was added passes always; of the others one in a hundred or fewer. What was removed passes until the next
`rebuild`. A place holds 16 bits of the one hash that belongs there, or says that several do and anything passes: small
enough that the places of a hundred thousand hashes stay in a processor's caches.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

_PLACES_PER_HASH = 8
_MIN_PLACES = 1 << 12
_FREE, _ANY = 0, 0xFFFF
_TAG_SHIFT = 48  # a hash's highest 16 bits


class Sieve:
    """Of 8-byte hashes as numbers; their lowest bits are the place, which SHA-256 spreads evenly."""

    def __init__(self) -> None:
        self.rebuild(np.empty(0, np.uint64))

    def rebuild(self, keys: NDArray[np.uint64]) -> None:
        """Let exactly these pass, with room for some more."""
        num_places = max(_MIN_PLACES, 1 << (_PLACES_PER_HASH * len(keys)).bit_length())
        self._mask = np.uint64(num_places - 1)
        self._tag = array("H", bytes(2 * num_places))
        self._tags = np.frombuffer(self._tag, np.uint16)  # the same, for many at once
        places, tags = keys & self._mask, (keys >> np.uint64(_TAG_SHIFT)).astype(np.uint16)
        self._tags[places] = tags
        self._tags[places[(self._tags[places] != tags) | (tags == _FREE)]] = _ANY
        self._num_added = len(keys)

    def add(self, key: int) -> bool:
        """Let a hash pass; False when so many were added that it is time to rebuild."""
        place, tag = key & int(self._mask), key >> _TAG_SHIFT or _ANY
        known = self._tag[place]
        self._tag[place] = tag if known in (_FREE, tag) else _ANY
        self._num_added += 1
        return self._num_added * _PLACES_PER_HASH <= len(self._tags)

    def passing(self, keys: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Positions, ascending, of the hashes that may be there; `keys` lie one after the other in memory."""
        held = self._tags.take((keys & self._mask).view(np.int64))
        taken = held.nonzero()[0]
        tags = held[taken]
        passing: NDArray[np.intp] = taken[(tags == keys.view(np.uint16)[3::4][taken]) | (tags == _ANY)]
        return passing
