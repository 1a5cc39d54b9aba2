"""A run: consecutive prefix blocks of one chain in one arena, kept as one thing, which leaves from its tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prfaas.hashing import NO_HASH
from prfaas.types import BlockHash

ChainKey = tuple[int, BlockHash]  # group and hash: a prefix block within one arena

# Longer chains are several runs, each hung on the one before it. Positions are searched for linearly, 10 ns a block.
MAX_RUN_BLOCKS = 256


@dataclass(frozen=True)
class BlockIdentity:
    """What `BlocksStored` says of one block, the hash one block earlier, and that of model and tenant where it is known."""

    group: int
    block_hash: BlockHash
    parent: BlockHash
    num_tokens: int
    before: BlockHash
    root: BlockHash = NO_HASH


class BlockRun:
    """Blocks that were stored one after the other. A linear state is a run of its own."""

    __slots__ = (
        "_last_used",
        "_num_uses",
        "_read_to",
        "above",
        "arena_number",
        "block_tokens",
        "children",
        "group",
        "hashes",
        "num_asked",
        "num_tokens",
        "num_written",
        "parent",
        "root",
        "slots",
    )

    def __init__(
        self,
        arena_number: int,
        group: int,
        *,
        above: ChainKey | None,
        parent: BlockHash,
        num_tokens: int,
        block_tokens: int,
        root: BlockHash = NO_HASH,
    ) -> None:
        """`above` is the block that the first one hangs on; `parent` and `num_tokens` are the first one's."""
        self.arena_number = arena_number
        self.group = group
        self.root = root
        self.above = above
        self.parent = parent
        self.num_tokens = num_tokens
        self.block_tokens = block_tokens
        self.slots: list[int] = []
        self.hashes: list[BlockHash] = []
        self.num_written = 0  # blocks whose writer's lease has not ended
        self.num_asked = 0  # blocks, from the start, that somebody used after they were stored
        self.children: dict[int, int] = {}  # position → how many blocks of other runs hang on that block
        self._read_to: dict[int, int] = {}  # end → how many leases use blocks before it, and the last of those
        self._num_uses: dict[int, int] = {}  # end → how often that was so, ever
        self._last_used: list[tuple[int, int]] = []  # (end, when), ends falling and times rising

    def __len__(self) -> int:
        return len(self.slots)

    def tokens_at(self, position: int) -> int:
        """Length of the chain up to the end of a block."""
        return self.num_tokens + position * self.block_tokens

    @property
    def tokens_above(self) -> int:
        """Length of the chain up to the end of what the first block hangs on."""
        if self.above is not None and self.above[1] == self.hashes[0]:
            return self.num_tokens
        return self.num_tokens - (self.num_tokens % self.block_tokens or self.block_tokens)

    def parent_at(self, position: int) -> BlockHash:
        """The parent of a block, as `BlocksStored` has it."""
        return self.hashes[position - 1] if position else self.parent

    def position_of(self, block_hash: BlockHash) -> int:
        """Where a block of this run stands in it; the last one is found at once."""
        return len(self.hashes) - 1 if self.hashes[-1] == block_hash else self.hashes.index(block_hash)

    def identity(self, position: int) -> BlockIdentity:
        """What it takes to publish a block elsewhere."""
        parent, above = self.parent_at(position), self.above
        own = above[1] if above is not None and above[0] == self.group else parent
        before = parent if position else own
        return BlockIdentity(self.group, self.hashes[position], parent, self.tokens_at(position), before, self.root)

    def num_equal(self, position: int, slots: Sequence[int], start: int) -> int:
        """How many slots from `slots[start]` on are those of this run from `position` on."""
        own = self.slots[position : position + len(slots) - start]
        if own == slots[start : start + len(own)]:
            return len(own)
        return next(n for n, slot in enumerate(own) if slot != slots[start + n])

    # Uses

    def grow(self, slots: Sequence[int], hashes: Sequence[BlockHash], when: int) -> None:
        """Append blocks that a lease still writes to."""
        self.slots += slots
        self.hashes += hashes
        self.num_written += len(slots)
        self._touch(len(self.slots), when)

    def read(self, end: int, when: int | None) -> None:
        """A lease uses blocks, the last of them the one before `end`; without `when` nobody asked for them."""
        self._read_to[end] = self._read_to.get(end, 0) + 1
        if when is not None:
            self._num_uses[end] = self._num_uses.get(end, 0) + 1
            self.num_asked = max(self.num_asked, end)
            self._touch(end, when)

    def unread(self, end: int) -> None:
        """Such a lease has ended."""
        left = self._read_to[end] = self._read_to[end] - 1
        if not left:
            del self._read_to[end]

    def _touch(self, end: int, when: int) -> None:
        last_used = self._last_used
        while last_used and last_used[-1][0] <= end:
            last_used.pop()
        last_used.append((end, when))

    def num_kept(self) -> int:
        """How many blocks from the start may not leave: somebody uses them, or something hangs on them."""
        if self.num_written:
            return len(self.slots)
        return max(max(self._read_to, default=0), max(self.children, default=-1) + 1)

    def num_reads(self) -> int:
        """How many uses by readers there are."""
        return sum(self._read_to.values())

    def add_child(self, position: int) -> None:
        """A block of another run comes to hang on a block of this one."""
        self.children[position] = self.children.get(position, 0) + 1

    def drop_child(self, position: int) -> None:
        """Such a block is gone."""
        left = self.children[position] = self.children[position] - 1
        if not left:
            del self.children[position]

    # The tail

    def tail_uses(self) -> tuple[int, int]:
        """When the last block was last used, and how often."""
        return self._last_used[0][1], 1 + self._num_uses.get(len(self.slots), 0)

    def even_tail(self) -> int:
        """Position from which on all blocks were used at the same times."""
        ends = (end for end in (*(its[0] for its in self._last_used), *self._num_uses) if end < len(self.slots))
        return max(ends, default=0)

    def cut(self, num_blocks: int) -> tuple[list[int], list[BlockHash]]:
        """Take off the last blocks; their slots and hashes, from the tail on."""
        left = len(self.slots) - num_blocks
        gone = self.slots[: left - 1 : -1] if left else self.slots[::-1]
        hashes = self.hashes[: left - 1 : -1] if left else self.hashes[::-1]
        del self.slots[left:], self.hashes[left:]
        self.num_asked = min(self.num_asked, left)
        while len(self._last_used) > 1 and self._last_used[1][0] >= left:
            del self._last_used[0]
        self._last_used[0] = (left, self._last_used[0][1])
        beyond = sum(self._num_uses.pop(end) for end in [end for end in self._num_uses if end >= left])
        if beyond:
            self._num_uses[left] = beyond
        return gone, hashes
