"""The table of checkpoints: holders of what is valid at one exact length, found by hash and length."""

import bisect
import functools
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS
from prfaas.index.query import Chain
from prfaas.index.segments import short_hash
from prfaas.types import BlockHash

_PLACES_PER_HASH = 8
_MIN_PLACES = 1 << 12
_FREE, _ANY = 0, 0xFFFF
_TAG_SHIFT = 48  # The tag is a hash's highest 16 bits.


class FingerprintFilter:
    """Filter that tells which of thousands of hashes may be in a table, at about 16 bytes per hash.

    A hash that was added always passes; of others at most one in a hundred does. A removed hash passes until the next
    `rebuild`. Keys are 8-byte hashes as numbers, whose lowest bits select a place. A place holds the tag of its only
    hash, or a mark that several share it and anything passes. So the places of a hundred thousand hashes stay in a
    processor's caches.
    """

    def __init__(self) -> None:
        self.rebuild(np.empty(0, np.uint64))

    def rebuild(self, keys: NDArray[np.uint64]) -> None:
        """Let exactly these keys pass, with room for some more."""
        num_places = max(_MIN_PLACES, 1 << (_PLACES_PER_HASH * len(keys)).bit_length())
        self._mask = np.uint64(num_places - 1)
        self._tag = array("H", bytes(2 * num_places))
        self._tags = np.frombuffer(self._tag, np.uint16)  # Same memory, for vector operations.
        places, tags = keys & self._mask, (keys >> np.uint64(_TAG_SHIFT)).astype(np.uint16)
        self._tags[places] = tags
        self._tags[places[(self._tags[places] != tags) | (tags == _FREE)]] = _ANY
        self._num_added = len(keys)

    def add(self, key: int) -> bool:
        """Let a key pass, and return False when so many were added that a rebuild is due."""
        place, tag = key & int(self._mask), key >> _TAG_SHIFT or _ANY
        known = self._tag[place]
        self._tag[place] = tag if known in (_FREE, tag) else _ANY
        self._num_added += 1
        return self._num_added * _PLACES_PER_HASH <= len(self._tags)

    def passing(self, keys: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the ascending positions of the keys that may be there; `keys` are contiguous in memory."""
        held = self._tags.take((keys & self._mask).view(np.int64))
        taken = held.nonzero()[0]
        tags = held[taken]
        passing: NDArray[np.intp] = taken[(tags == keys.view(np.uint16)[3::4][taken]) | (tags == _ANY)]
        return passing


Holders = tuple[int, ...]  # Ascending.
NOBODY: Holders = ()


@functools.lru_cache(4096)
def _shared(holders: Holders) -> Holders:
    """Return equal holders as one object, since many checkpoints have the same ones."""
    return holders


_HASH = np.dtype(f"V{HASH_BYTES}")
_KEY = np.dtype([("hash", _HASH), ("num_tokens", "<u4")])
_KEY_BYTES = np.dtype(f"V{_KEY.itemsize}")
_SHORT_HASH = np.dtype({"names": ["short"], "formats": ["<u8"], "itemsize": _KEY.itemsize})
_SWEPT_PER_STEP = 64  # Checkpoints, as many as a cell has blocks; they take about 30 µs.


class ExactEntry(NamedTuple):
    """Checkpoint of exactly `num_tokens` tokens with its holders."""

    block_hash: BlockHash
    anchor: BlockHash
    num_tokens: int
    holders: Holders


class ExactTable:
    """All checkpoints of one model: holders by hash and length together."""

    def __init__(self) -> None:
        self._entries: dict[bytes, Holders] = {}
        self._anchors: dict[bytes, BlockHash] = {}  # Of states at lengths that no unit hash of a query covers.
        self._odd: dict[int, tuple[int, ...]] = {}  # Lengths of the checkpoints that have a short anchor.
        # Number of checkpoints beyond the first that have a short anchor at one length.
        self._further: dict[tuple[int, int], int] = {}
        self._filter, self._odd_filter = FingerprintFilter(), FingerprintFilter()
        self._num_at_units = 0  # Entries whose length is a multiple of 16 tokens.

    def __len__(self) -> int:
        return len(self._entries)

    def holds(self, holder: int, *, block_hash: BlockHash, num_tokens: int) -> bool:
        """Return whether the table names `holder` for this checkpoint."""
        return holder in self._entries.get(_key(block_hash, num_tokens), NOBODY)

    def store(self, holder: int, *, block_hash: BlockHash, num_tokens: int, anchor: BlockHash | None) -> bool:
        """Add a holder, and return whether it is new.

        A partial block has no `anchor`: it is found by the state of its length, which has the same hash and without
        which it serves nothing.
        """
        key = _key(block_hash, num_tokens)
        known = self._entries.get(key, NOBODY)
        if holder in known:
            return False
        self._entries[key] = _shared(tuple(sorted({*known, holder})))
        if not known:
            self._note_new(key, num_tokens)
        if anchor is not None and num_tokens % HASH_UNIT_TOKENS and key not in self._anchors:
            self._note_odd(key, anchor, num_tokens)
        return True

    def _note_new(self, key: bytes, num_tokens: int) -> None:
        if not self._filter.add(short_hash(key)):
            self._filter.rebuild(np.frombuffer(b"".join(self._entries), _SHORT_HASH)["short"])
        self._num_at_units += not num_tokens % HASH_UNIT_TOKENS

    def _note_odd(self, key: bytes, anchor: BlockHash, num_tokens: int) -> None:
        self._anchors[key] = anchor
        at = short_hash(anchor)
        lengths = self._odd.get(at, ())
        if num_tokens in lengths:
            self._further[at, num_tokens] = self._further.get((at, num_tokens), 0) + 1
            return
        self._odd[at] = tuple(sorted((*lengths, num_tokens)))
        if not self._odd_filter.add(at):
            self._odd_filter.rebuild(np.fromiter(self._odd, np.uint64, len(self._odd)))

    def remove(self, holder: int, *, block_hash: BlockHash, num_tokens: int) -> bool:
        """Remove a holder, and return whether it was there."""
        return self._remove(_key(block_hash, num_tokens), holder)

    def _remove(self, key: bytes, holder: int) -> bool:
        known = self._entries.get(key, NOBODY)
        if holder not in known:
            return False
        left = _shared(tuple([member for member in known if member != holder]))
        if left:
            self._entries[key] = left
        else:
            self._drop(key)
        return True

    def _drop(self, key: bytes) -> None:
        del self._entries[key]
        anchor, num_tokens = self._anchors.pop(key, None), _num_tokens(key)
        self._num_at_units -= not num_tokens % HASH_UNIT_TOKENS
        if anchor is not None:
            self._drop_odd(short_hash(anchor), num_tokens)

    def _drop_odd(self, at: int, num_tokens: int) -> None:
        further = self._further.pop((at, num_tokens), 0)
        if further > 1:
            self._further[at, num_tokens] = further - 1
        if further:
            return
        rest = tuple(length for length in self._odd[at] if length != num_tokens)
        if rest:
            self._odd[at] = rest
        else:
            del self._odd[at]

    def held(
        self, units: Chain, num_units: int, *, stated: Iterable[tuple[int, BlockHash]] = ()
    ) -> tuple[list[int], dict[int, int]]:
        """Return the ascending lengths of held checkpoints, and per holder a bitmap over them.

        The search covers the ends of the first `num_units` units and the `stated` lengths.
        """
        lengths, sets = self._at_units(units, num_units)
        for length, block_hash in stated:
            known = self._entries.get(_key(block_hash, length))
            if known is not None and length not in lengths:
                place = bisect.bisect(lengths, length)
                lengths.insert(place, length)
                sets.insert(place, known)
        return lengths, _bitmaps(sets)

    def _at_units(self, units: Chain, num_units: int) -> tuple[list[int], list[Holders]]:
        """Return the ascending lengths of checkpoints that end where a unit ends, and each one's holders."""
        if not self._num_at_units:
            return [], []
        positions = self._filter.passing(units.tails[:num_units])
        keys = np.empty(len(positions), _KEY)
        keys["hash"] = np.frombuffer(units.hashes, _HASH)[positions]
        keys["num_tokens"] = ends = (positions + 1) * HASH_UNIT_TOKENS
        sets = [*map(self._entries.get, keys.view(_KEY_BYTES).tolist(), itertools.repeat(NOBODY))]
        return [*itertools.compress(ends.tolist(), sets)], [*filter(None, sets)]

    def odd_lengths(self, units: Chain, num_units: int) -> list[int]:
        """Return the ascending lengths of checkpoints that depend on these units. Only their hashes tell whether they fit."""
        if not self._odd:
            return []
        keys = units.tails[:num_units]
        passing = keys[self._odd_filter.passing(keys)].tolist()
        return sorted({length for key in passing for length in self._odd.get(key, ())})

    def sweep(self, is_alive: Callable[[int], bool]) -> Iterator[int]:
        """Forget dead holders, a few entries per step, and yield the number of entries dropped in each."""
        keys = list(self._entries)
        for start in range(0, len(keys), _SWEPT_PER_STEP):
            yield sum(self._sweep_entry(key, is_alive) for key in keys[start : start + _SWEPT_PER_STEP])

    def _sweep_entry(self, key: bytes, is_alive: Callable[[int], bool]) -> bool:
        """Forget dead holders of an entry, and return whether the entry went with its last holder."""
        known = self._entries.get(key)
        if known is None:
            return False
        for holder in known:
            if not is_alive(holder):
                self._remove(key, holder)
        return key not in self._entries

    def __iter__(self) -> Iterator[ExactEntry]:
        """Yield each entry as it is when its turn comes; the table may change between two entries."""
        for key in list(self._entries):
            known = self._entries.get(key)
            if known is None:
                continue
            block_hash = BlockHash(key[:HASH_BYTES])
            yield ExactEntry(block_hash, self._anchors.get(key, block_hash), _num_tokens(key), known)


def _key(block_hash: BlockHash, num_tokens: int) -> bytes:
    return block_hash + num_tokens.to_bytes(4, "little")


def _num_tokens(key: bytes) -> int:
    return int.from_bytes(key[HASH_BYTES:], "little")


def _bitmaps(sets: list[Holders]) -> dict[int, int]:
    """Return per holder a bitmap over the places of `sets`. Neighbours often have the same holders."""
    bitmaps: dict[int, int] = {}
    first = 0
    for place in range(1, len(sets) + 1):
        if place == len(sets) or sets[place] != sets[first]:
            for holder in sets[first]:
                bitmaps[holder] = bitmaps.get(holder, 0) | (1 << place) - (1 << first)
            first = place
    return bitmaps
