"""The pool: which slots of a node's arenas hold what, who uses them, and which leave first.

A slot is free, a *transfer block* (what one transfer needs) or a *prefix block* (full, hashed, reusable). Transfer
blocks and prefix blocks have budgets of their own, so that transfers can never push prefix blocks out. Every use stands under
a lease of an owner; a slot in use is neither evicted nor given away. A prefix block leaves only when none hangs on it, so
that chains are evicted from the tail. Runs on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from prfaas.cachepool.arena import Arena, stride_of
from prfaas.cachepool.eviction import POLICIES, BlockFacts, Candidates, EvictionPolicy
from prfaas.cachepool.layout import Layout
from prfaas.cachepool.leases import LeaseId, Leases
from prfaas.cachepool.slots import ChainKey, PrefixBlock, Slots
from prfaas.events import BlockRemoved, BlockStored, PoolEvent
from prfaas.types import BlockHash

__all__ = ["LeaseId", "Pool", "PoolStats"]


@dataclass(frozen=True)
class PoolStats:
    """Number of slots by kind, over all arenas: prefix, transfer, quarantined and free are apart from each other."""

    slots_by_kind: dict[str, int]
    prefix_bytes: int
    transfer_bytes: int
    num_leases: int
    num_evicted: int


class Pool:
    """All arenas of a node under one byte budget."""

    def __init__(
        self,
        budget_bytes: int,
        *,
        transfer_ratio: float = 0.5,
        eviction: EvictionPolicy = "lru",
        on_event: Callable[[PoolEvent], None] | None = None,
    ) -> None:
        self._transfer_budget = int(budget_bytes * transfer_ratio)
        self._prefix_budget = budget_bytes - self._transfer_budget
        self._budget_bytes = budget_bytes
        self._sort_key = POLICIES[eviction]
        self._on_event = on_event
        self._slots: dict[bytes, Slots] = {}
        self._numbered: list[Slots] = []
        self._leases = Leases()
        self._candidates = Candidates()
        self._floor = 0.0  # sort key of the last block that left: what the ageing policies count from
        self._tick = 0
        self._transfer_bytes = 0
        self._prefix_bytes = 0
        self._num_evicted = 0

    @property
    def arenas(self) -> list[Arena]:
        return [slots.arena for slots in self._numbered]

    def arena(self, layout: Layout) -> Arena:
        """The arena of a layout, made at its first use; it may grow to the whole budget but touches nothing yet."""
        slots = self._slots.get(layout.fingerprint)
        if slots is None:
            arena = Arena(layout, max(1, self._budget_bytes // stride_of(layout)))
            slots = self._slots[layout.fingerprint] = Slots(len(self._numbered), arena)
            self._numbered.append(slots)
        return slots.arena

    def _of(self, arena: Arena) -> Slots:
        return self._slots[arena.layout.fingerprint]

    # Leases

    def open_lease(self, owner: str) -> LeaseId:
        return self._leases.open(owner)

    def end_lease(self, lease: LeaseId) -> None:
        """Every use under this lease ends; ending it twice does nothing."""
        for slots, used in self._leases.end(lease):
            idle, unneeded = slots.release(used)
            for slot in slots.idle_leaves(idle):
                self._settle(slots, slot)
            slots.free += reversed(unneeded)  # the first of them are the first to be used again
            self._transfer_bytes -= len(unneeded) * slots.arena.stride_bytes

    def end_owner(self, owner: str) -> None:
        """The owner is dead: all its leases end, but for quarantined ones."""
        for lease in self._leases.of_owner(owner):
            self.end_lease(lease)

    def quarantine(self, lease: LeaseId) -> None:
        """Somebody may still write to these slots: they stay taken until `end_lease`, whatever happens to the owner."""
        self._leases.quarantine(lease)

    # Transfer blocks

    def allocate(self, arena: Arena, num_slots: int, lease: LeaseId) -> list[int] | None:
        """Transfer blocks under `lease`, or None when the transfer budget does not hold that many."""
        slots, num_bytes = self._of(arena), num_slots * arena.stride_bytes
        if self._transfer_bytes + num_bytes > self._transfer_budget:
            return None
        assert self._leases.is_open(lease), "blocks are allocated under a lease that has not ended"
        self._find_pages(slots, num_slots)
        taken = slots.take(num_slots)
        if taken is not None:
            self._transfer_bytes += num_bytes
            self._leases.add(lease, slots, taken)
        return taken

    def _find_pages(self, slots: Slots, num_slots: int) -> None:
        """Where memory would exceed the budget, free slots of other arenas give theirs back."""
        backed_bytes = sum(other.num_backed * other.arena.stride_bytes for other in self._numbered)
        excess = backed_bytes + slots.num_fresh(num_slots) * slots.arena.stride_bytes - self._budget_bytes
        for other in self._numbered:
            if excess <= 0:
                return
            if other is not slots and other.free and not other.arena.pinned:
                num_returned = min(len(other.free), -(-excess // other.arena.stride_bytes))
                other.give_back(num_returned)
                excess -= num_returned * other.arena.stride_bytes

    # Prefix blocks

    def find(self, arena: Arena, group: int, block_hash: BlockHash) -> int | None:
        """The slot of a prefix block."""
        return self._of(arena).by_hash[group].get(block_hash)

    def find_all(self, arena: Arena, group: int, hashes: Iterable[BlockHash]) -> list[int | None]:
        """The slots of prefix blocks, in the order of their hashes."""
        return list(map(self._of(arena).by_hash[group].get, hashes))

    def parent(self, arena: Arena, slot: int) -> BlockHash:
        """What a prefix block hangs on, as `BlockStored` has it. Raises KeyError when the slot holds none."""
        return self._of(arena).blocks[slot][2]

    def states_after(self, arena: Arena, group: int, unit: BlockHash) -> dict[BlockHash, int]:
        """Linear states, with their lengths, that end within the 16 tokens after `unit` (the root, or a full unit's hash)."""
        return self._of(arena).states[group].get(unit, {})

    def pin(self, arena: Arena, pinned: Iterable[int], lease: LeaseId) -> None:
        """Use prefix blocks under `lease`; they are not evicted meanwhile."""
        slots, used = self._of(arena), list(pinned)
        self._leases.add(lease, slots, used)
        self._tick += 1
        slots.use(used, self._tick)
        if len(self._candidates):
            for slot in used:
                self._candidates.discard((slots.number, slot))

    def soft_pin(self, arena: Arena, pinned: Iterable[int], *, keep: bool) -> None:
        """Prefix blocks that leave only when no other block can (or, with keep=False, like any other again)."""
        slots = self._of(arena)
        for slot in pinned:
            if keep and slot in slots.blocks:
                slots.soft_pinned.add(slot)
            else:
                slots.soft_pinned.discard(slot)
            self._settle(slots, slot)

    def publish(
        self,
        arena: Arena,
        slot: int,
        *,
        group: int,
        block_hash: BlockHash,
        parent: BlockHash,
        num_tokens: int,
        before: BlockHash | None = None,
    ) -> bool:
        """A transfer block that is whole becomes a prefix block; whether it did.

        `parent` is as `BlockStored` has it; `before` is the hash one block earlier, where that is another one. A block of the
        same hash that is there already stays instead. Where no room can be made the block stays a transfer block.
        """
        slots = self._of(arena)
        assert slots.references[slot], "only a block in use can be published"
        if block_hash in slots.by_hash[group] or slot in slots.blocks:
            return False
        before = parent if before is None else before
        above = slots.chain_parent(group, block_hash, before)
        self._hang(slots, above)
        if not self._make_room(arena.stride_bytes):
            slots.unhang(above)
            self._settle_key(slots, above)
            return False
        self._tick += 1
        slots.store(slot, (group, block_hash, parent, num_tokens, before, self._tick))
        self._transfer_bytes -= arena.stride_bytes
        self._prefix_bytes += arena.stride_bytes
        if self._on_event is not None:
            self._on_event(BlockStored(arena.layout.fingerprint, group, block_hash, parent, num_tokens))
        return True

    def publish_run(
        self,
        arena: Arena,
        run: Sequence[int],
        *,
        group: int,
        hashes: Sequence[BlockHash],
        parent: BlockHash,
        num_tokens: Sequence[int],
    ) -> None:
        """`publish` for consecutive blocks of one chain; where all of them are new, several times as fast."""
        slots, num_bytes = self._of(arena), len(run) * arena.stride_bytes
        parents = [parent, *hashes[:-1]]
        above = slots.chain_parent(group, hashes[0], parent)
        assert all(map(slots.references.__getitem__, run)), "only a block in use can be published"
        if slots.is_new_run(run, group, hashes, parents):
            self._hang(slots, above)
            if self._make_room(num_bytes):
                self._tick += 1
                whens = repeat(self._tick)
                self._store_run(slots, run, list(zip(repeat(group), hashes, parents, num_tokens, parents, whens)))
                return
            slots.unhang(above)
            self._settle_key(slots, above)
        for slot, block_hash, before, tokens in zip(run, hashes, parents, num_tokens, strict=True):
            self.publish(arena, slot, group=group, block_hash=block_hash, parent=before, num_tokens=tokens)

    def _store_run(self, slots: Slots, run: Sequence[int], blocks: list[PrefixBlock]) -> None:
        slots.store_run(run, blocks)
        self._transfer_bytes -= len(run) * slots.arena.stride_bytes
        self._prefix_bytes += len(run) * slots.arena.stride_bytes
        if self._on_event is not None:
            for group, block_hash, parent, num_tokens, _, _ in blocks:
                self._on_event(BlockStored(slots.arena.layout.fingerprint, group, block_hash, parent, num_tokens))

    def _hang(self, slots: Slots, above: ChainKey | None) -> None:
        """A block comes to hang on `above`, which therefore may not be what makes room for it."""
        slots.hang(above)
        parent_slot = slots.slot_of(above)
        if parent_slot is not None:
            self._candidates.discard((slots.number, parent_slot))

    # Eviction

    def _settle(self, slots: Slots, slot: int) -> None:
        """Put a block among the evictable ones when it is."""
        if slots.is_idle_leaf(slot):
            key = self._sort_key(self._facts(slots, slot), self._floor)
            self._candidates.add((slots.number, slot), key, soft=slot in slots.soft_pinned)

    def _settle_key(self, slots: Slots, key: ChainKey | None) -> None:
        slot = slots.slot_of(key)
        if slot is not None:
            self._settle(slots, slot)

    def _facts(self, slots: Slots, slot: int) -> BlockFacts:
        number, _, _, num_tokens, _, stored = slots.blocks[slot]
        group = slots.arena.layout.groups[number]
        last_used, num_uses = slots.last_used.get(slot, stored), 1 + slots.num_uses.get(slot, 0)
        return BlockFacts(
            group.kind, group.block_tokens, num_tokens, slots.arena.stride_bytes, last_used=last_used, num_uses=num_uses
        )

    def _make_room(self, num_bytes: int) -> bool:
        """Evict until that many bytes fit the prefix budget; False when too much is in use."""
        while self._prefix_bytes + num_bytes > self._prefix_budget:
            victim = self._candidates.pop()
            if victim is None:
                return False
            number, slot, self._floor = victim
            self._evict(self._numbered[number], slot)
        return True

    def _evict(self, slots: Slots, slot: int) -> None:
        block = slots.remove(slot)
        self._settle_key(slots, slots.above(block))
        slots.free.append(slot)
        self._prefix_bytes -= slots.arena.stride_bytes
        self._num_evicted += 1
        if self._on_event is not None:
            self._on_event(BlockRemoved(slots.arena.layout.fingerprint, *block[:2]))

    # Facts

    def stats(self) -> PoolStats:
        free = sum(len(slots.free) + len(slots.given_back) for slots in self._numbered)
        prefix = sum(len(slots.blocks) for slots in self._numbered)
        quarantined = self._num_quarantined()
        transfer = sum(slots.never_used for slots in self._numbered) - free - prefix - quarantined
        kinds = {"prefix": prefix, "transfer": transfer, "quarantined": quarantined, "free": free}
        return PoolStats(kinds, self._prefix_bytes, self._transfer_bytes, len(self._leases), self._num_evicted)

    def _num_quarantined(self) -> int:
        uses = self._leases.quarantined_uses()
        return len({(slots.number, slot) for slots, used in uses for slot in used if slot not in slots.blocks})

    def check_integrity(self) -> None:
        """Compare all bookkeeping with what it is derived from. O(slots): for tests and diagnosis.

        Raises:
            AssertionError: something leaks, is counted twice or is evictable though it is needed.
        """
        uses = [[0] * slots.never_used for slots in self._numbered]
        for slots, used in self._leases.all_uses():
            for slot in used:
                uses[slots.number][slot] += 1
        prefix_bytes = transfer_bytes = num_leaves = 0
        for slots, counts in zip(self._numbered, uses, strict=True):
            slots.check_integrity(counts)
            stride = slots.arena.stride_bytes
            prefix_bytes += len(slots.blocks) * stride
            transfer_bytes += sum(1 for slot, n in enumerate(counts) if n and slot not in slots.blocks) * stride
            leaves = slots.idle_leaves(slots.blocks)
            assert all((slots.number, slot) in self._candidates for slot in leaves), "an idle leaf cannot be evicted"
            num_leaves += len(leaves)
        assert num_leaves == len(self._candidates), "a block is evictable though it is needed"
        assert (prefix_bytes, transfer_bytes) == (self._prefix_bytes, self._transfer_bytes), "the byte counts are wrong"
        assert prefix_bytes <= self._prefix_budget and transfer_bytes <= self._transfer_budget, "a budget is exceeded"

    def close(self) -> None:
        for slots in self._numbered:
            slots.arena.close()
