"""Tables of block hashes that grow a 256th at a time.

A dictionary that doubles copies all it has: with a million blocks that holds up the process that feeds an index for a
tenth of a second. Of 256 by the first byte of the hash each copies its own part, and not all at the same block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from prfaas.index.segments import CELL_BLOCKS
from prfaas.types import BlockHash

_PARTS = 256  # values of a byte
Value = TypeVar("Value")


class ShardedDict(Generic[Value]):
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


class ShardedSet:
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


_USERS_BITS = 32  # of a place, the lowest: how many hold the block or are its children
_USERS = (1 << _USERS_BITS) - 1


class Ancestry:
    """A block is known as long as it has users. Adding a child uses its parent; who holds a block says so by `use`."""

    def __init__(self) -> None:
        self._places = ShardedDict[int]()  # index in the chain, then the number of users
        self._parents = ShardedDict[BlockHash]()  # of all but the first of each chain

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._places

    def index(self, block_hash: BlockHash) -> int:
        """How many blocks come before it in its chain. Raises KeyError when it is not known."""
        return self._places[block_hash] >> _USERS_BITS

    def deepest_first(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Known blocks, those with the most before them first."""
        parts = self._places.parts
        return [
            its
            for _, its in sorted(
                [(parts[block_hash[0]][block_hash], block_hash) for block_hash in hashes], reverse=True
            )
        ]

    def follows(self, parent: BlockHash, index: int) -> bool:
        """Whether the block at `index` of a chain can have this parent, which is known."""
        return self.index(parent) == index - 1

    def add(self, block_hash: BlockHash, *, parent: BlockHash, index: int) -> None:
        """Note a new block, without users; its parent is known unless `index` is 0."""
        self._places[block_hash] = index << _USERS_BITS
        if index:
            self._parents[block_hash] = parent
            self.use(parent)

    def add_run(self, hashes: Sequence[BlockHash], *, parent: BlockHash, index: int) -> bool:
        """Note consecutive blocks, each with one user beside its child; False, and nothing happens, unless all are new and
        where they belong."""
        if not self._places.has_none(hashes) or len(set(hashes)) < len(hashes):
            return False
        if (index > 0) != (parent in self._places) or (index and not self.follows(parent, index)):
            return False
        places, parents = self._places.parts, self._parents.parts
        before, place = parent, index << _USERS_BITS | 2
        for block_hash in hashes:
            part = block_hash[0]
            places[part][block_hash] = place
            parents[part][block_hash] = before
            before, place = block_hash, place + (1 << _USERS_BITS)
        self._places[hashes[-1]] -= 1
        if index:
            self.use(parent)
        else:
            del self._parents[hashes[0]]
        return True

    def knows(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether all of these are known."""
        return hashes[0] in self._places and self._places.has_all(hashes)

    def use_each(self, hashes: Iterable[BlockHash]) -> None:
        """One user more of each of these known blocks."""
        for block_hash in hashes:
            self._places[block_hash] += 1

    def use(self, block_hash: BlockHash) -> None:
        """One user more of a known block."""
        self._places[block_hash] += 1

    def release(self, block_hash: BlockHash | None) -> None:
        """One user less; a block without users goes, and with it its use of its parent."""
        while block_hash is not None:
            place = self._places[block_hash] - 1
            if place & _USERS:
                self._places[block_hash] = place
                return
            del self._places[block_hash]
            block_hash = self._parents.pop(block_hash)

    def head(self, block_hash: BlockHash) -> BlockHash:
        """The head of the known block's cell."""
        parents = self._parents
        for _ in range(self.index(block_hash) % CELL_BLOCKS):
            block_hash = parents[block_hash]
        return block_hash

    def path(self, block_hash: BlockHash) -> list[BlockHash]:
        """The chain from the head of the block's cell to the block."""
        path = [block_hash]
        parts = self._parents.parts
        for _ in range(self.index(block_hash) % CELL_BLOCKS):
            block_hash = parts[block_hash[0]][block_hash]
            path.append(block_hash)
        return path[::-1]
