"""What is valid at one exact length: linear states and partial last blocks, by hash.

A length that is a multiple of 16 tokens has a unit hash, so a query finds it among its own units. Any other length is
found by the hash that the query states for it; for the lengths that a query did not state, `odd_lengths` says where
along its units such checkpoints stand, so that the asker, who has the tokens, can hash them and ask again.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS
from prfaas.index.chain import Chain
from prfaas.index.holder_sets import HolderSets
from prfaas.index.segments import TAIL_BYTES, short_hash
from prfaas.index.sieve import Sieve
from prfaas.types import BlockHash

_MASK_32 = (1 << 32) - 1
_SWEPT_PER_STEP = 64  # checkpoints, as a cell has blocks: some 30 µs


class ExactEntry(NamedTuple):
    """Who holds something that ends at exactly `num_tokens`."""

    block_hash: BlockHash
    anchor: BlockHash
    num_tokens: int
    holders: tuple[int, ...]


class ExactTable:
    """All checkpoints, keyed by the first 8 bytes of their hash and compared by all 16.

    A value is one number: the hash's other 8 bytes, the length, the set of holders (64, 32 and 32 bits).
    """

    def __init__(self) -> None:
        self._entries: dict[int, int] = {}
        self._anchors: dict[int, BlockHash] = {}  # of the entries whose anchor is another hash than their own
        self._odd: dict[int, tuple[int, ...]] = {}  # short anchor → lengths of the checkpoints that hang on it
        self._sieve, self._odd_sieve = Sieve(), Sieve()  # of the keys of both
        self._sets = HolderSets()

    def __len__(self) -> int:
        return len(self._entries)

    def store(self, holder: int, *, block_hash: BlockHash, anchor: BlockHash, num_tokens: int) -> bool:
        """Note that `holder` has it; False when that is known, or when another hash shares its first 8 bytes."""
        key, claim = short_hash(block_hash), _rest(block_hash) << 32 | num_tokens
        known = self._entries.get(key)
        if known is None:
            self._entries[key] = claim << 32 | self._sets.add(None, holder)
            self._note_place(key, block_hash, anchor, num_tokens)
            return True
        if known >> 32 != claim or holder in self._sets[known & _MASK_32]:
            return False
        self._entries[key] = claim << 32 | self._sets.add(known & _MASK_32, holder)
        return True

    def _note_place(self, key: int, block_hash: BlockHash, anchor: BlockHash, num_tokens: int) -> None:
        if not self._sieve.add(key):
            self._sieve.rebuild(self._entries)
        if anchor != block_hash:
            self._anchors[key] = anchor
        if num_tokens % HASH_UNIT_TOKENS:
            at = short_hash(anchor)
            self._odd[at] = tuple(sorted({*self._odd.get(at, ()), num_tokens}))
            if not self._odd_sieve.add(at):
                self._odd_sieve.rebuild(self._odd)

    def remove(self, holder: int, block_hash: BlockHash) -> bool:
        """Note that `holder` no longer has it; False when it had not."""
        key = short_hash(block_hash)
        known = self._entries.get(key)
        if known is None or known >> 64 != _rest(block_hash) or holder not in self._sets[known & _MASK_32]:
            return False
        self._remove_holder(key, known, holder)
        return True

    def _remove_holder(self, key: int, known: int, holder: int) -> None:
        left = self._sets.discard(known & _MASK_32, holder)
        if left is None:
            self._drop(key, known >> 32 & _MASK_32)
        else:
            self._entries[key] = known >> 32 << 32 | left

    def _drop(self, key: int, num_tokens: int) -> None:
        del self._entries[key]
        anchor = self._anchors.pop(key, None)
        if anchor is None or not num_tokens % HASH_UNIT_TOKENS:
            return
        at = short_hash(anchor)
        rest = tuple(length for length in self._odd.get(at, ()) if length != num_tokens)
        if rest:
            self._odd[at] = rest
        else:
            self._odd.pop(at, None)

    def _set_of(self, block_hash: bytes, num_tokens: int) -> int | None:
        known = self._entries.get(short_hash(block_hash))
        if known is None or known >> 32 != _rest(block_hash) << 32 | num_tokens:
            return None
        return known & _MASK_32

    def held(
        self, units: Chain, num_units: int, *, stated: Iterable[tuple[int, bytes]] = ()
    ) -> tuple[list[int], dict[int, int]]:
        """The lengths, ascending, that somebody holds something of, and per holder a bitmap over them.

        Looked at are the ends of the first `num_units` units and the `stated` lengths.
        """
        lengths, sets = self._at_units(units, num_units)
        for length, its in stated:
            number = self._set_of(its, length)
            if number is not None and length not in lengths:
                place = bisect.bisect(lengths, length)
                lengths.insert(place, length)
                sets.insert(place, number)
        return lengths, self._bitmaps(sets)

    def _at_units(self, units: Chain, num_units: int) -> tuple[list[int], list[int]]:
        """Lengths, ascending, of what ends where a unit ends, and of each the set of its holders."""
        keys = np.frombuffer(units.tails, np.uint64, num_units)
        positions = self._sieve.passing(keys)
        rests = np.frombuffer(units.hashes, np.uint64)[1::2][positions].tolist()
        known = map(self._entries.get, keys[positions].tolist(), itertools.repeat(0))
        lengths, sets = [], []
        for position, rest, its in zip(positions.tolist(), rests, known, strict=True):
            length = (position + 1) * HASH_UNIT_TOKENS
            number = its ^ (rest << 64 | length << 32)
            if number <= _MASK_32:  # the set alone is left: hash and length are the same
                lengths.append(length)
                sets.append(number)
        return lengths, sets

    def _bitmaps(self, sets: list[int]) -> dict[int, int]:
        """Holder → bitmap over the places of `sets`."""
        by_set: dict[int, int] = {}
        for place, number in enumerate(sets):
            by_set[number] = by_set.get(number, 0) | 1 << place
        bitmaps: dict[int, int] = {}
        for number, bits in by_set.items():
            for holder in self._sets[number]:
                bitmaps[holder] = bitmaps.get(holder, 0) | bits
        return bitmaps

    def odd_lengths(self, units: Chain, num_units: int) -> list[int]:
        """Lengths, ascending, of checkpoints hanging on one of these units; their hash alone tells whether they fit."""
        if not self._odd:
            return []
        keys = np.frombuffer(units.tails, np.uint64, num_units)
        passing = keys[self._odd_sieve.passing(keys)].tolist()
        return sorted({length for key in passing for length in self._odd.get(key, ())})

    def sweep(self, is_alive: Callable[[int], bool]) -> Iterator[int]:
        """Forget dead holders, a few entries a step; each yields the number of entries dropped."""
        keys = list(self._entries)
        for start in range(0, len(keys), _SWEPT_PER_STEP):
            yield sum(self._sweep_entry(key, is_alive) for key in keys[start : start + _SWEPT_PER_STEP])

    def _sweep_entry(self, key: int, is_alive: Callable[[int], bool]) -> bool:
        """Whether the entry goes with its last holder."""
        known = self._entries.get(key)
        if known is None:
            return False
        for holder in self._sets[known & _MASK_32]:
            if not is_alive(holder):
                self._remove_holder(key, self._entries[key], holder)
        return key not in self._entries

    def __iter__(self) -> Iterator[ExactEntry]:
        """Each entry as it is when its turn comes: between two of them the table may change."""
        for key in list(self._entries):
            known = self._entries.get(key)
            if known is None:
                continue
            block_hash = BlockHash((key | known >> 64 << 64).to_bytes(HASH_BYTES, "little"))
            anchor = self._anchors.get(key, block_hash)
            yield ExactEntry(block_hash, anchor, known >> 32 & _MASK_32, self._sets[known & _MASK_32])


def _rest(block_hash: bytes) -> int:
    """What of a hash is not its key."""
    return int.from_bytes(block_hash[TAIL_BYTES:], "little")
