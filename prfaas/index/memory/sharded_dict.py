"""Tables of block hashes that grow a 256th at a time.

A dictionary that doubles copies all it has: with a million blocks that holds up the process that feeds an index for a
tenth of a second. Of 256 by the first byte of the hash each copies its own part, and not all at the same block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from prfaas.types import BlockHash

_PARTS = 256  # values of a byte
Value = TypeVar("Value")


class SpreadDict(Generic[Value]):
    """From a hash, which has at least one byte, to a value."""

    def __init__(self) -> None:
        self.parts: list[dict[BlockHash, Value]] = [{} for _ in range(_PARTS)]  # by first byte

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self.parts[block_hash[0]]

    def __getitem__(self, block_hash: BlockHash) -> Value:
        return self.parts[block_hash[0]][block_hash]

    def __setitem__(self, block_hash: BlockHash, value: Value) -> None:
        self.parts[block_hash[0]][block_hash] = value

    def __delitem__(self, block_hash: BlockHash) -> None:
        del self.parts[block_hash[0]][block_hash]

    def pop(self, block_hash: BlockHash) -> Value | None:
        """Take a hash out; its value, or None when it is not there."""
        return self.parts[block_hash[0]].pop(block_hash, None)

    def update(self, pairs: Iterable[tuple[BlockHash, Value]]) -> None:
        parts = self.parts
        for block_hash, value in pairs:
            parts[block_hash[0]][block_hash] = value

    def has_none(self, hashes: Iterable[BlockHash]) -> bool:
        parts = self.parts
        return not any(block_hash in parts[block_hash[0]] for block_hash in hashes)

    def has_all(self, hashes: Iterable[BlockHash]) -> bool:
        parts = self.parts
        return all(block_hash in parts[block_hash[0]] for block_hash in hashes)


class SpreadSet:
    """Hashes, which have at least one byte."""

    def __init__(self) -> None:
        self._parts: list[set[BlockHash]] = [set() for _ in range(_PARTS)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._parts[block_hash[0]]

    def __iter__(self) -> Iterator[BlockHash]:
        for part in self._parts:
            yield from part

    def add(self, block_hash: BlockHash) -> None:
        self._parts[block_hash[0]].add(block_hash)

    def update(self, hashes: Iterable[BlockHash]) -> None:
        parts = self._parts
        for block_hash in hashes:
            parts[block_hash[0]].add(block_hash)

    def discard_each(self, hashes: Iterable[BlockHash]) -> None:
        parts = self._parts
        for block_hash in hashes:
            parts[block_hash[0]].discard(block_hash)

    def lacking(self, hashes: Iterable[BlockHash]) -> set[BlockHash]:
        """Those that are not here."""
        parts = self._parts
        return {block_hash for block_hash in hashes if block_hash not in parts[block_hash[0]]}

    def has_all(self, hashes: Iterable[BlockHash]) -> bool:
        parts = self._parts
        return all(block_hash in parts[block_hash[0]] for block_hash in hashes)
