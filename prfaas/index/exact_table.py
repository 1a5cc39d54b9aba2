"""What is valid at one exact length: linear states and partial last blocks, by hash.

A length that is a multiple of 16 tokens has a unit hash, so a query finds it among its own units. Any other length is
found by the hash that the query states for it; for the lengths that a query did not state, `odd_lengths` says where
along its units such checkpoints stand, so that the asker, who has the tokens, can hash them and ask again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS
from prfaas.index.segments import short_hash
from prfaas.types import BlockHash


@dataclass(frozen=True, slots=True)
class ExactEntry:
    """Who holds something that ends at exactly `num_tokens`."""

    block_hash: BlockHash
    anchor: BlockHash
    num_tokens: int
    holders: array[int]


class ExactTable:
    """All checkpoints, keyed by the first 8 bytes of their hash and compared by all 16."""

    def __init__(self) -> None:
        self._entries: dict[int, ExactEntry] = {}
        self._odd: dict[int, tuple[int, ...]] = {}  # short anchor → lengths of the checkpoints that hang on it

    def __len__(self) -> int:
        return len(self._entries)

    def store(self, holder: int, *, block_hash: BlockHash, anchor: BlockHash, num_tokens: int) -> bool:
        """Note that `holder` has it; False when that is known, or when another hash shares its first 8 bytes."""
        key = short_hash(block_hash)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = ExactEntry(block_hash, anchor, num_tokens, array("I"))
            if num_tokens % HASH_UNIT_TOKENS:
                at = short_hash(anchor)
                self._odd[at] = tuple(sorted({*self._odd.get(at, ()), num_tokens}))
        if entry.block_hash != block_hash or entry.num_tokens != num_tokens or holder in entry.holders:
            return False
        entry.holders.append(holder)
        return True

    def remove(self, holder: int, block_hash: BlockHash) -> bool:
        """Note that `holder` no longer has it; False when it had not."""
        entry = self._entries.get(short_hash(block_hash))
        if entry is None or entry.block_hash != block_hash or holder not in entry.holders:
            return False
        entry.holders.remove(holder)
        if not entry.holders:
            self._drop(entry)
        return True

    def _drop(self, entry: ExactEntry) -> None:
        del self._entries[short_hash(entry.block_hash)]
        at = short_hash(entry.anchor)
        rest = tuple(length for length in self._odd.get(at, ()) if length != entry.num_tokens)
        if rest:
            self._odd[at] = rest
        else:
            self._odd.pop(at, None)

    def get(self, block_hash: bytes, num_tokens: int) -> ExactEntry | None:
        entry = self._entries.get(short_hash(block_hash))
        return entry if entry and entry.block_hash == block_hash and entry.num_tokens == num_tokens else None

    def at_units(self, units: bytes, shorts: Iterable[int]) -> list[ExactEntry]:
        """The entries that end where one of the units ends; `shorts` are the short hashes of `units` (16 B each)."""
        found = [self._entries[key] for key in self._entries.keys() & shorts]
        return [entry for entry in found if _unit_at(units, entry.num_tokens) == entry.block_hash]

    def odd_lengths(self, shorts: Iterable[int]) -> list[int]:
        """Lengths, ascending, of checkpoints hanging on one of these units; their hash alone tells whether they fit."""
        return sorted({length for key in self._odd.keys() & shorts for length in self._odd[key]})

    def sweep(self, is_alive: Callable[[int], bool]) -> int:
        """Forget dead holders; returns the number of entries dropped."""
        dropped = 0
        for entry in list(self._entries.values()):
            dead = [holder for holder in entry.holders if not is_alive(holder)]
            for holder in dead:
                entry.holders.remove(holder)
            if not entry.holders:
                self._drop(entry)
                dropped += 1
        return dropped

    def __iter__(self) -> Iterator[ExactEntry]:
        return iter(list(self._entries.values()))


def _unit_at(units: bytes, num_tokens: int) -> bytes:
    end = num_tokens // HASH_UNIT_TOKENS * HASH_BYTES
    return units[end - HASH_BYTES : end] if num_tokens % HASH_UNIT_TOKENS == 0 else b""
