"""What is valid at one exact length: linear states and partial last blocks, by hash.

A length that is a multiple of 16 tokens has a unit hash, so a query finds it among its own units. Any other length is
found by the hash that the query states for it; for the lengths that a query did not state, `odd_lengths` says where
along its units such checkpoints stand, so that the asker, who has the tokens, can hash them and ask again.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS
from prfaas.index.segments import short_hash
from prfaas.types import BlockHash

_LOOK_EACH_UP = 12  # one look-up by position costs as much as this many in bulk


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
        self._ends: Counter[int] = Counter()  # unit → entries that end with it
        self._anchors: Counter[int] = Counter()  # unit → odd entries that hang on it

    def __len__(self) -> int:
        return len(self._entries)

    def store(self, holder: int, *, block_hash: BlockHash, anchor: BlockHash, num_tokens: int) -> bool:
        """Note that `holder` has it; False when that is known, or when another hash shares its first 8 bytes."""
        key = short_hash(block_hash)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = ExactEntry(block_hash, anchor, num_tokens, array("I"))
            self._count(num_tokens, 1)
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

    def _count(self, num_tokens: int, change: int) -> None:
        unit, tail = divmod(num_tokens, HASH_UNIT_TOKENS)
        counter = self._anchors if tail else self._ends
        counter[unit] += change
        if not counter[unit]:
            del counter[unit]

    def _drop(self, entry: ExactEntry) -> None:
        self._count(entry.num_tokens, -1)
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

    def at_units(self, units: bytes, num_units: int) -> list[ExactEntry]:
        """The entries that end where one of the first `num_units` units ends; `units` are their hashes, joined."""
        shorts = _shorts(units, num_units, self._ends)
        found = [self._entries[key] for key in self._entries.keys() & shorts]
        return [entry for entry in found if _unit_at(units, entry.num_tokens) == entry.block_hash]

    def odd_lengths(self, units: bytes, num_units: int) -> list[int]:
        """Lengths, ascending, of checkpoints hanging on one of these units; their hash alone tells whether they fit."""
        shorts = _shorts(units, num_units, self._anchors)
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


def _shorts(units: bytes, num_units: int, wanted: Collection[int]) -> list[int]:
    """Short hashes of the wanted units among the first `num_units`: of all of them where that is quicker."""
    num_units = min(num_units, len(units) // HASH_BYTES)
    if len(wanted) * _LOOK_EACH_UP > num_units:
        return array("Q", units[: num_units * HASH_BYTES])[::2].tolist()
    return [short_hash(units[(unit - 1) * HASH_BYTES : unit * HASH_BYTES]) for unit in wanted if 0 < unit <= num_units]


def _unit_at(units: bytes, num_tokens: int) -> bytes:
    end = num_tokens // HASH_UNIT_TOKENS * HASH_BYTES
    return units[end - HASH_BYTES : end] if num_tokens % HASH_UNIT_TOKENS == 0 else b""
