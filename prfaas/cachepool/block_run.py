"""The block run: consecutive prefix blocks of one hash chain in one arena, which leave from the tail."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from prfaas.hashing import NO_HASH
from prfaas.kv.kinds.kind import ChainKey
from prfaas.types import BlockHash

# A longer chain is several runs, each hung on the previous one. Positions are found by linear search, 10 ns per block.
MAX_RUN_BLOCKS = 256


@dataclass(frozen=True)
class BlockIdentity:
    """Everything that `BlocksStored` states about one block, with the previous block's hash and the chain's root."""

    group: int
    block_hash: BlockHash
    parent: BlockHash
    num_tokens: int
    before: BlockHash
    root: BlockHash = NO_HASH


@dataclass(eq=False, slots=True)
class BlockRun:
    """Blocks that were stored one after the other. A linear state is a run of its own.

    `above` is the block that the first block depends on; `parent` and `num_tokens` are the first block's. An *end* is the
    position after a block.
    """

    arena_number: int
    group: int
    above: ChainKey | None
    parent: BlockHash
    num_tokens: int
    block_tokens: int
    root: BlockHash = NO_HASH
    slots: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    num_written: int = 0  # Blocks whose writer's lease has not ended.
    num_read: int = 0  # Leading blocks that somebody has read since they were stored.
    children: dict[int, int] = field(default_factory=dict)  # Blocks of other runs that depend on a position.
    readers: dict[int, int] = field(default_factory=dict)  # Leases that read up to an end.
    _last_used: list[tuple[int, int]] = field(default_factory=list)  # (end, time), with falling ends and rising times.

    def __len__(self) -> int:
        return len(self.slots)

    def tokens_at(self, position: int) -> int:
        """Return the length of the chain up to the end of a block."""
        return self.num_tokens + position * self.block_tokens

    def position_of(self, block_hash: BlockHash) -> int:
        """Return a block's position. The last block is found at once."""
        return len(self.hashes) - 1 if self.hashes[-1] == block_hash else self.hashes.index(block_hash)

    def identity(self, position: int) -> BlockIdentity:
        """Return everything that is needed to publish a block elsewhere."""
        parent = before = self.hashes[position - 1] if position else self.parent
        if not position and self.above is not None and self.above[0] == self.group:
            before = self.above[1]
        return BlockIdentity(self.group, self.hashes[position], parent, self.tokens_at(position), before, self.root)

    def num_equal(self, position: int, slots: Sequence[int], start: int) -> int:
        """Return how many slots from `slots[start]` on are this run's slots from `position` on."""
        own = self.slots[position : position + len(slots) - start]
        if own == slots[start : start + len(own)]:
            return len(own)
        return next(n for n, slot in enumerate(own) if slot != slots[start + n])

    # Uses

    def grow(self, slots: Sequence[int], hashes: Sequence[BlockHash], now: int) -> None:
        """Append blocks that a lease still writes."""
        self.slots += slots
        self.hashes += hashes
        self.num_written += len(slots)
        self._touch(len(self.slots), now)

    def begin_read(self, end: int, now: int | None) -> None:
        """Count a lease that reads up to `end`. Without `now` the read is not a use that delays eviction."""
        self.readers[end] = self.readers.get(end, 0) + 1
        if now is not None:
            self.num_read = max(self.num_read, end)
            self._touch(end, now)

    def end_read(self, end: int) -> None:
        """Count that such a lease has ended."""
        left = self.readers[end] = self.readers[end] - 1
        if not left:
            del self.readers[end]

    def _touch(self, end: int, now: int) -> None:
        last_used = self._last_used
        while last_used and last_used[-1][0] <= end:
            last_used.pop()
        last_used.append((end, now))

    def num_kept(self) -> int:
        """Return how many leading blocks may not leave because of a reader, a writer or a child."""
        if self.num_written:
            return len(self.slots)
        return max(max(self.readers, default=0), max(self.children, default=-1) + 1)

    def add_child(self, position: int) -> None:
        """Count a block of another run that depends on a block of this run."""
        self.children[position] = self.children.get(position, 0) + 1

    def drop_child(self, position: int) -> None:
        """Subtract a block that was removed."""
        left = self.children[position] = self.children[position] - 1
        if not left:
            del self.children[position]

    # The tail

    def tail_last_used(self) -> int:
        """Return the time of the last block's last use."""
        return self._last_used[0][1]

    def even_tail(self) -> int:
        """Return the position from which on all blocks were last used together, and all or none have been read."""
        ends = (end for end in (self.num_read, *(end for end, _ in self._last_used)) if end < len(self.slots))
        return max(ends, default=0)

    def cut(self, num_blocks: int) -> tuple[list[int], list[BlockHash]]:
        """Remove the last blocks and return their slots and hashes, the tail first."""
        left = len(self.slots) - num_blocks
        gone, hashes = self.slots[left:][::-1], self.hashes[left:][::-1]
        del self.slots[left:], self.hashes[left:]
        self.num_read = min(self.num_read, left)
        while len(self._last_used) > 1 and self._last_used[1][0] >= left:
            del self._last_used[0]
        self._last_used[0] = (left, self._last_used[0][1])
        return gone, hashes
