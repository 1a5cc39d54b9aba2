"""The slots of one arena: which are free, how often each is used, and the prefix blocks that some of them hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prfaas.cachepool.arena import Arena
from prfaas.types import BlockHash

ChainKey = tuple[int, BlockHash]  # group and hash: a prefix block within one arena


# What a slot holds: group, hash, parent (as `BlockStored` has it), number of tokens, the hash one block earlier, and when it
# was stored, in uses of the pool.
# A plain tuple, since a million objects of a class would be a million for the garbage collector to visit.
PrefixBlock = tuple[int, BlockHash, BlockHash, int, BlockHash, int]


class Slots:
    """Bookkeeping of one arena's slots; keeps no budget and decides nothing."""

    def __init__(self, number: int, arena: Arena) -> None:
        groups = arena.layout.groups
        self.number = number
        self.arena = arena
        self.never_used = 0  # slots from here on were never given out
        self.free: list[int] = []  # their pages are there
        self.given_back: list[int] = []  # free, their pages went back to the system
        self.references: list[int] = []  # slot → uses under leases
        self.num_uses: dict[int, int] = {}  # slot → how often its prefix block was asked for since it was stored
        self.last_used: dict[int, int] = {}  # slot → when it was last asked for
        self.blocks: dict[int, PrefixBlock] = {}
        self.by_hash: tuple[dict[BlockHash, int], ...] = tuple({} for _ in groups)
        self.num_children: tuple[dict[BlockHash, int], ...] = tuple({} for _ in groups)
        self.states: tuple[dict[BlockHash, dict[BlockHash, int]], ...] = tuple({} for _ in groups)
        self.soft_pinned: set[int] = set()
        self._first_attention = next((i for i, group in enumerate(groups) if group.kind == "full_attention"), None)

    @property
    def num_backed(self) -> int:
        """Slots whose pages are, or may be, in memory."""
        return self.never_used - len(self.given_back)

    def num_fresh(self, num_slots: int) -> int:
        """How many of the next `num_slots` slots would need new pages."""
        return max(0, num_slots - len(self.free))

    def take(self, num_slots: int) -> list[int] | None:
        """Free slots, each used once and of a new generation; None when there are not that many."""
        if num_slots > len(self.free) + len(self.given_back) + self.arena.num_slots - self.never_used:
            return None
        taken = _pop(self.free, num_slots)
        taken += _pop(self.given_back, num_slots - len(taken))
        taken += self._first_time(num_slots - len(taken))
        references = self.references
        for slot in taken:
            references[slot] = 1
        self.arena.bump(taken)
        return taken

    def _first_time(self, num_slots: int) -> list[int]:
        start, self.never_used = self.never_used, self.never_used + num_slots
        self.references += [0] * num_slots
        return list(range(start, self.never_used))

    def give_back(self, num_slots: int) -> None:
        """Return the pages of that many free slots to the system."""
        returned = _pop(self.free, num_slots)
        self.arena.give_back(returned)
        self.given_back += returned

    def release(self, used: Iterable[int]) -> tuple[list[int], list[int]]:
        """One use of each slot ends; those that nobody uses any more, as (prefix blocks, others)."""
        references, blocks = self.references, self.blocks
        idle: list[int] = []
        unneeded: list[int] = []
        for slot in used:
            left = references[slot] = references[slot] - 1
            if not left:
                (idle if slot in blocks else unneeded).append(slot)
        return idle, unneeded

    def use(self, used: Sequence[int], tick: int) -> None:
        """Use prefix blocks once more."""
        references, num_uses = self.references, self.num_uses
        for slot in used:
            references[slot] += 1
            num_uses[slot] = num_uses.get(slot, 0) + 1
        self.last_used.update(dict.fromkeys(used, tick))

    # Prefix blocks

    def chain_parent(self, group: int, block_hash: BlockHash, before: BlockHash) -> ChainKey | None:
        """The block that this one hangs on: the one before it, for a linear state the attention block that ends with it."""
        if self.arena.layout.groups[group].kind != "linear_state":
            return (group, before) if before != block_hash else None
        return None if self._first_attention is None else (self._first_attention, block_hash)

    def above(self, block: PrefixBlock) -> ChainKey | None:
        group, block_hash, _, _, before, _ = block
        return self.chain_parent(group, block_hash, before)

    def slot_of(self, key: ChainKey | None) -> int | None:
        return None if key is None else self.by_hash[key[0]].get(key[1])

    def is_idle_leaf(self, slot: int) -> bool:
        """Whether the slot holds a prefix block which nobody uses and none hangs on."""
        block = None if self.references[slot] else self.blocks.get(slot)
        return block is not None and block[1] not in self.num_children[block[0]]

    def idle_leaves(self, candidates: Iterable[int]) -> list[int]:
        """Those of the slots that are idle leaves."""
        references, blocks, num_children = self.references, self.blocks, self.num_children
        idle = ((slot, blocks[slot]) for slot in candidates if not references[slot] and slot in blocks)
        return [slot for slot, block in idle if block[1] not in num_children[block[0]]]

    def hang(self, key: ChainKey | None) -> None:
        """Count one more block that hangs on `key`, whether that is stored or not."""
        if key is not None:
            group, block_hash = key
            children = self.num_children[group]
            children[block_hash] = children.get(block_hash, 0) + 1

    def unhang(self, key: ChainKey | None) -> None:
        """Count one less."""
        if key is not None:
            group, block_hash = key
            children = self.num_children[group]
            if children[block_hash] == 1:
                del children[block_hash]
            else:
                children[block_hash] -= 1

    def store(self, slot: int, block: PrefixBlock) -> None:
        """The slot holds this prefix block from here on; the caller has hung it on its chain."""
        group, block_hash, parent, num_tokens, _, _ = block
        self.blocks[slot] = block
        self.by_hash[group][block_hash] = slot
        if self.arena.layout.groups[group].kind == "linear_state":
            self.states[group].setdefault(parent, {})[block_hash] = num_tokens

    def remove(self, slot: int) -> PrefixBlock:
        """The slot is no prefix block any more."""
        block = self.blocks.pop(slot)
        group, block_hash, parent, _, _, _ = block
        del self.by_hash[group][block_hash]
        self.num_uses.pop(slot, None)
        self.last_used.pop(slot, None)
        self.soft_pinned.discard(slot)
        self.unhang(self.above(block))
        states = self.states[group]
        if parent in states:
            states[parent].pop(block_hash, None)
            if not states[parent]:
                del states[parent]
        return block

    def is_new_run(
        self, run: Sequence[int], group: int, hashes: Sequence[BlockHash], parents: Sequence[BlockHash]
    ) -> bool:
        """Whether none of these blocks is here and nothing hangs on any but the first one's parent."""
        return (
            self.arena.layout.groups[group].kind != "linear_state"
            and len(set(hashes)) == len(hashes)
            and self.by_hash[group].keys().isdisjoint(hashes)
            and self.num_children[group].keys().isdisjoint(hashes)
            and self.blocks.keys().isdisjoint(run)
            and parents[0] not in hashes
        )

    def store_run(self, run: Sequence[int], blocks: Sequence[PrefixBlock]) -> None:
        """`store` of a new run, each block hung on the one before it; the caller has hung the first."""
        group = blocks[0][0]
        hashes = [block[1] for block in blocks]
        self.blocks.update(zip(run, blocks, strict=True))
        self.by_hash[group].update(zip(hashes, run, strict=True))
        self.num_children[group].update(dict.fromkeys(hashes[:-1], 1))

    # Our own bookkeeping, checked

    def check_integrity(self, uses: Sequence[int]) -> None:
        """Compare every table with what it is derived from; `uses[slot]` counts the leases' uses. O(slots).

        Raises:
            AssertionError: two tables disagree.
        """
        absent = self.free + self.given_back
        assert list(uses) == self.references, "references differ from the leases' uses"
        assert len(set(absent)) == len(absent), "a slot is free twice"
        assert not any(self.references[slot] or slot in self.blocks for slot in absent), "a free slot is in use"
        taken = {slot for slot, count in enumerate(uses) if count} | self.blocks.keys()
        assert len(taken) + len(absent) == self.never_used, "a slot is neither free nor in use"
        stored = {block[:2]: slot for slot, block in self.blocks.items()}
        found = {(group, key): slot for group, table in enumerate(self.by_hash) for key, slot in table.items()}
        assert stored == found, "blocks are not found under their hashes"
        assert self.num_uses.keys() == self.last_used.keys() <= self.blocks.keys(), "uses of something else are counted"
        self._check_chains()

    def _check_chains(self) -> None:
        counted: dict[tuple[int, BlockHash], int] = {}
        for block in self.blocks.values():
            above = self.above(block)
            if above is not None:
                counted[above] = counted.get(above, 0) + 1
        kept = {(group, key): num for group, table in enumerate(self.num_children) for key, num in table.items()}
        assert counted == kept, "counts of children differ from the chains"
        kinds = [group.kind for group in self.arena.layout.groups]
        states = {(b[0], b[2], b[1]) for b in self.blocks.values() if kinds[b[0]] == "linear_state"}
        listed = {(g, unit, key) for g, table in enumerate(self.states) for unit, keys in table.items() for key in keys}
        assert states == listed, "states are not found under their last unit"
        assert self.soft_pinned <= self.blocks.keys(), "a soft pin on something that is no prefix block"


def _pop(stack: list[int], num_slots: int) -> list[int]:
    """Up to `num_slots` from the end of a list."""
    if num_slots <= 0:
        return []
    popped = stack[-num_slots:]
    del stack[-num_slots:]
    return popped
