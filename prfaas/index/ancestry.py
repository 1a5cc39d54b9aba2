"""Chains of one block size: parent and position of each block that is held or has a held descendant.

A chain may begin inside a prompt: windows have no earlier blocks of their size.

The tables are plain dictionaries of bytes and numbers, which Python's garbage collector need not search. With an object
per block its full collections would stop the process that feeds an index for tenths of a second.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from prfaas.index.segments import CELL_BLOCKS
from prfaas.types import BlockHash

_NUM_SHARDS = 256  # One for each value of a hash's first byte.
_USERS_BITS = 32
_USERS = (1 << _USERS_BITS) - 1
Value = TypeVar("Value")


class ShardedDict(Generic[Value]):
    """Dictionary by hash that grows a 256th at a time.

    A plain dictionary that doubles copies everything: with a million blocks that takes a tenth of a second.
    """

    def __init__(self) -> None:
        self.shards: list[dict[BlockHash, Value]] = [{} for _ in range(_NUM_SHARDS)]

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self.shards[block_hash[0]]

    def __getitem__(self, block_hash: BlockHash) -> Value:
        return self.shards[block_hash[0]][block_hash]

    def __setitem__(self, block_hash: BlockHash, value: Value) -> None:
        self.shards[block_hash[0]][block_hash] = value

    def __delitem__(self, block_hash: BlockHash) -> None:
        del self.shards[block_hash[0]][block_hash]

    def pop(self, block_hash: BlockHash) -> Value | None:
        """Remove a hash and return its value, or None when it is not there."""
        return self.shards[block_hash[0]].pop(block_hash, None)

    def has_any(self, hashes: Iterable[BlockHash]) -> bool:
        shards = self.shards
        return any(block_hash in shards[block_hash[0]] for block_hash in hashes)

    def has_all(self, hashes: Iterable[BlockHash]) -> bool:
        shards = self.shards
        return all(block_hash in shards[block_hash[0]] for block_hash in hashes)


class ShardedSet:
    """Set of hashes that grows a 256th at a time."""

    def __init__(self) -> None:
        self._shards: list[set[BlockHash]] = [set() for _ in range(_NUM_SHARDS)]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._shards[block_hash[0]]

    def __iter__(self) -> Iterator[BlockHash]:
        for shard in self._shards:
            yield from shard

    def update(self, hashes: Iterable[BlockHash]) -> None:
        shards = self._shards
        for block_hash in hashes:
            shards[block_hash[0]].add(block_hash)

    def difference_update(self, hashes: Iterable[BlockHash]) -> None:
        shards = self._shards
        for block_hash in hashes:
            shards[block_hash[0]].discard(block_hash)

    def lacking(self, hashes: Iterable[BlockHash]) -> set[BlockHash]:
        """Return the hashes that are not here."""
        shards = self._shards
        return {block_hash for block_hash in hashes if block_hash not in shards[block_hash[0]]}

    def has_all(self, hashes: Iterable[BlockHash]) -> bool:
        shards = self._shards
        return all(block_hash in shards[block_hash[0]] for block_hash in hashes)


class Ancestry:
    """Blocks of one size with their parents. A block is known while it has users: its holders and its children."""

    def __init__(self) -> None:
        self._places = ShardedDict[int]()  # Index in the chain in the high bits, the number of users in the low bits.
        self._parents = ShardedDict[BlockHash]()  # Of all blocks but the first known one of each chain.

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._places

    def index(self, block_hash: BlockHash) -> int:
        """Return the number of blocks before this one in its chain. Raises KeyError when it is not known."""
        return self._places[block_hash] >> _USERS_BITS

    def deepest_first(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Return known blocks with the ends of chains first."""
        shards = self._places.shards
        places = [(shards[block_hash[0]][block_hash], block_hash) for block_hash in hashes]
        return [block_hash for _, block_hash in sorted(places, reverse=True)]

    def follows(self, parent: BlockHash, index: int) -> bool:
        """Return whether the block at `index` of a chain can have this known parent."""
        return self.index(parent) == index - 1

    def add(self, block_hash: BlockHash, *, parent: BlockHash, index: int) -> None:
        """Add a new block without users. It begins a chain unless its parent is known."""
        self._places[block_hash] = index << _USERS_BITS
        if index and parent in self._places:
            self._parents[block_hash] = parent
            self.use([parent])

    def add_run(self, hashes: Sequence[BlockHash], *, parent: BlockHash, index: int, begins_anywhere: bool) -> bool:
        """Add consecutive blocks, each with one user besides its child.

        Return False and add nothing unless all blocks are new and fit behind `parent`, or begin a chain.
        """
        if self._places.has_any(hashes) or len(set(hashes)) < len(hashes):
            return False
        has_parent = parent in self._places
        if has_parent and not (index and self.follows(parent, index)):
            return False
        if index and not has_parent and not begins_anywhere:
            return False
        places, parents = self._places.shards, self._parents.shards
        before, place = parent, index << _USERS_BITS | 2
        for block_hash in hashes:
            shard = block_hash[0]
            places[shard][block_hash] = place
            parents[shard][block_hash] = before
            before, place = block_hash, place + (1 << _USERS_BITS)
        self._places[hashes[-1]] -= 1
        if has_parent:
            self.use([parent])
        else:
            del self._parents[hashes[0]]
        return True

    def knows_all(self, hashes: Sequence[BlockHash]) -> bool:
        return hashes[0] in self._places and self._places.has_all(hashes)

    def use(self, hashes: Iterable[BlockHash]) -> None:
        """Add a user to each of these known blocks."""
        for block_hash in hashes:
            self._places[block_hash] += 1

    def release(self, block_hash: BlockHash | None) -> None:
        """Remove a user. A block without users goes, and with it one use of its parent."""
        while block_hash is not None:
            place = self._places[block_hash] - 1
            if place & _USERS:
                self._places[block_hash] = place
                return
            del self._places[block_hash]
            block_hash = self._parents.pop(block_hash)

    def head(self, block_hash: BlockHash) -> BlockHash:
        """Return the head of the known block's cell."""
        return self.path(block_hash)[0]

    def path(self, block_hash: BlockHash) -> list[BlockHash]:
        """Return the chain from the head of the block's cell, or from the chain's beginning, to the block."""
        path = [block_hash]
        shards = self._parents.shards
        for _ in range(self.index(block_hash) % CELL_BLOCKS):
            parent = shards[block_hash[0]].get(block_hash)
            if parent is None:
                break
            block_hash = parent
            path.append(block_hash)
        return path[::-1]
