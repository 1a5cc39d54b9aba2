"""Which of many hashes may be in a table: 16 bytes per hash or a few more, thousands looked up at once.

A hash that was added passes always; of the others one in a hundred or fewer. What was removed passes until the next
`rebuild`. A place holds 16 bits of the one hash that belongs there, or says that several do and anything passes: small
enough that the places of a hundred thousand hashes stay in a processor's caches.
"""

from __future__ import annotations

import bisect
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
_TAG_SHIFT = 48  # a hash's highest 16 bits


class FingerprintFilter:
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


NOBODY = 0  # the number of the empty set


class HolderSets:
    """Every set that some entry names, each once. An entry gives its set back with the change that replaces it."""

    def __init__(self) -> None:
        self._sets: list[tuple[int, ...]] = [()]
        self._uses: list[int] = [0]
        self._ids: dict[tuple[int, ...], int] = {}
        self._free: list[int] = []

    def __getitem__(self, number: int) -> tuple[int, ...]:
        return self._sets[number]

    def add(self, number: int, holder: int) -> int:
        """The set that an entry has after `holder` came to set `number`."""
        return self._exchange(number, tuple(sorted({*self._sets[number], holder})))

    def discard(self, number: int, holder: int) -> int:
        """The set that an entry has after `holder` left set `number`."""
        return self._exchange(number, tuple(other for other in self._sets[number] if other != holder))

    def _exchange(self, number: int, holders: tuple[int, ...]) -> int:
        taken = self._take(holders) if holders else NOBODY
        if number != NOBODY:
            self._give_back(number)
        return taken

    def _take(self, holders: tuple[int, ...]) -> int:
        known = self._ids.get(holders)
        if known is not None:
            self._uses[known] += 1
            return known
        number = self._free.pop() if self._free else len(self._sets)
        if number == len(self._sets):
            self._sets.append(holders)
            self._uses.append(1)
        else:
            self._sets[number], self._uses[number] = holders, 1
        self._ids[holders] = number
        return number

    def _give_back(self, number: int) -> None:
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._ids[self._sets[number]]
            self._sets[number] = ()
            self._free.append(number)


_HASH = np.dtype(f"V{HASH_BYTES}")
_KEY = np.dtype([("hash", _HASH), ("num_tokens", "<u4")])
_KEY_BYTES = np.dtype(f"V{_KEY.itemsize}")
_SHORT_HASH = np.dtype({"names": ["short"], "formats": ["<u8"], "itemsize": _KEY.itemsize})
_SWEPT_PER_STEP = 64  # checkpoints, as a cell has blocks: some 30 µs


class ExactEntry(NamedTuple):
    """Who holds something that ends at exactly `num_tokens`."""

    block_hash: BlockHash
    anchor: BlockHash
    num_tokens: int
    holders: tuple[int, ...]


class ExactTable:
    """All checkpoints: by hash and length together, the number of a set of holders."""

    def __init__(self) -> None:
        self._entries: dict[bytes, int] = {}
        self._anchors: dict[bytes, BlockHash] = {}  # of the states at lengths that a query has no unit hash of
        self._odd: dict[int, tuple[int, ...]] = {}  # short anchor → lengths of the checkpoints that hang on it
        self._further: dict[
            tuple[int, int], int
        ] = {}  # short anchor and length → how many hang there besides the first
        self._sieve, self._odd_sieve = FingerprintFilter(), FingerprintFilter()  # of the short hashes of both
        self._sets = HolderSets()
        self._num_at_units = 0  # entries whose length is a multiple of 16 tokens

    def __len__(self) -> int:
        return len(self._entries)

    def holds(self, holder: int, *, block_hash: BlockHash, num_tokens: int) -> bool:
        """Whether `holder` has it, as far as is noted here."""
        return holder in self._sets[self._entries.get(_key(block_hash, num_tokens), NOBODY)]

    def store(self, holder: int, *, block_hash: BlockHash, num_tokens: int, anchor: BlockHash | None) -> bool:
        """Note that `holder` has it; False when that is known. A partial block has no `anchor`: it serves nothing without
        the state of its length, which has the same hash, and is looked for by that."""
        key = _key(block_hash, num_tokens)
        known = self._entries.get(key, NOBODY)
        if holder in self._sets[known]:
            return False
        self._entries[key] = self._sets.add(known, holder)
        if known == NOBODY:
            self._note_new(key, num_tokens)
        if anchor is not None and num_tokens % HASH_UNIT_TOKENS and key not in self._anchors:
            self._note_odd(key, anchor, num_tokens)
        return True

    def _note_new(self, key: bytes, num_tokens: int) -> None:
        if not self._sieve.add(short_hash(key)):
            self._sieve.rebuild(np.frombuffer(b"".join(self._entries), _SHORT_HASH)["short"])
        self._num_at_units += not num_tokens % HASH_UNIT_TOKENS

    def _note_odd(self, key: bytes, anchor: BlockHash, num_tokens: int) -> None:
        self._anchors[key] = anchor
        at = short_hash(anchor)
        lengths = self._odd.get(at, ())
        if num_tokens in lengths:
            self._further[at, num_tokens] = self._further.get((at, num_tokens), 0) + 1
            return
        self._odd[at] = tuple(sorted((*lengths, num_tokens)))
        if not self._odd_sieve.add(at):
            self._odd_sieve.rebuild(np.fromiter(self._odd, np.uint64, len(self._odd)))

    def remove(self, holder: int, *, block_hash: BlockHash, num_tokens: int) -> bool:
        """Note that `holder` no longer has it; False when it had not."""
        return self._remove(_key(block_hash, num_tokens), holder)

    def _remove(self, key: bytes, holder: int) -> bool:
        known = self._entries.get(key, NOBODY)
        if holder not in self._sets[known]:
            return False
        left = self._sets.discard(known, holder)
        if left == NOBODY:
            self._drop(key)
        else:
            self._entries[key] = left
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
        """The lengths, ascending, that somebody holds something of, and per holder a bitmap over them.

        Looked at are the ends of the first `num_units` units and the `stated` lengths.
        """
        lengths, sets = self._at_units(units, num_units)
        for length, its in stated:
            known = self._entries.get(_key(its, length))
            if known is not None and length not in lengths:
                place = bisect.bisect(lengths, length)
                lengths.insert(place, length)
                sets.insert(place, known)
        return lengths, self._bitmaps(sets)

    def _at_units(self, units: Chain, num_units: int) -> tuple[list[int], list[int]]:
        """Lengths, ascending, of what ends where a unit ends, and of each the set of its holders."""
        if not self._num_at_units:
            return [], []
        positions = self._sieve.passing(units.tails[:num_units])
        keys = np.empty(len(positions), _KEY)
        keys["hash"] = np.frombuffer(units.hashes, _HASH)[positions]
        keys["num_tokens"] = ends = (positions + 1) * HASH_UNIT_TOKENS
        sets = [*map(self._entries.get, keys.view(_KEY_BYTES).tolist(), itertools.repeat(NOBODY))]
        return [*itertools.compress(ends.tolist(), sets)], [*filter(None, sets)]

    def _bitmaps(self, sets: list[int]) -> dict[int, int]:
        """Holder → bitmap over the places of `sets`."""
        bitmaps: dict[int, int] = {}
        for number, bits in _places(sets).items():
            for holder in self._sets[number]:
                bitmaps[holder] = bitmaps.get(holder, 0) | bits
        return bitmaps

    def odd_lengths(self, units: Chain, num_units: int) -> list[int]:
        """Lengths, ascending, of checkpoints hanging on one of these units; their hash alone tells whether they fit."""
        if not self._odd:
            return []
        keys = units.tails[:num_units]
        passing = keys[self._odd_sieve.passing(keys)].tolist()
        return sorted({length for key in passing for length in self._odd.get(key, ())})

    def sweep(self, is_alive: Callable[[int], bool]) -> Iterator[int]:
        """Forget dead holders, a few entries a step; each yields the number of entries dropped."""
        keys = list(self._entries)
        for start in range(0, len(keys), _SWEPT_PER_STEP):
            yield sum(self._sweep_entry(key, is_alive) for key in keys[start : start + _SWEPT_PER_STEP])

    def _sweep_entry(self, key: bytes, is_alive: Callable[[int], bool]) -> bool:
        """Whether the entry goes with its last holder."""
        known = self._entries.get(key)
        if known is None:
            return False
        for holder in self._sets[known]:
            if not is_alive(holder):
                self._remove(key, holder)
        return key not in self._entries

    def __iter__(self) -> Iterator[ExactEntry]:
        """Each entry as it is when its turn comes: between two of them the table may change."""
        for key in list(self._entries):
            known = self._entries.get(key)
            if known is None:
                continue
            block_hash = BlockHash(key[:HASH_BYTES])
            yield ExactEntry(block_hash, self._anchors.get(key, block_hash), _num_tokens(key), self._sets[known])


def _key(block_hash: BlockHash, num_tokens: int) -> bytes:
    return block_hash + num_tokens.to_bytes(4, "little")


def _num_tokens(key: bytes) -> int:
    return int.from_bytes(key[HASH_BYTES:], "little")


def _places(sets: list[int]) -> dict[int, int]:
    """Set → bitmap over the places where it stands; neighbours often share one."""
    places: dict[int, int] = {}
    first = 0
    for place in range(1, len(sets) + 1):
        if place == len(sets) or sets[place] != sets[first]:
            places[sets[first]] = places.get(sets[first], 0) | (1 << place) - (1 << first)
            first = place
    return places
