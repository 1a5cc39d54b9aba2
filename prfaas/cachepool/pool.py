"""The pool: which slots of a node's arenas hold what, who uses them, and which leave first.

A slot is free, a *transfer block* (what one transfer needs) or a *prefix block* (full, hashed, reusable). Transfer
blocks and prefix blocks have budgets of their own, so that transfers can never push prefix blocks out. Every use stands under
a lease of an owner; a slot in use is neither evicted nor given away. Runs on one thread.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NewType

from prfaas.cachepool.arena import Arena, stride_of
from prfaas.cachepool.layout import Layout
from prfaas.events import BlockRemoved, BlockStored, PoolEvent
from prfaas.types import BlockHash

LeaseId = NewType("LeaseId", int)
_Key = tuple[int, BlockHash]  # group, block hash


@dataclass
class _Lease:
    owner: str
    slots: list[tuple[_ArenaSlots, int]] = field(default_factory=list)
    quarantined: bool = False


@dataclass(frozen=True)
class _Prefix:
    """What a prefix block is."""

    key: _Key
    parent: _Key
    num_tokens: int


class _ArenaSlots:
    """The slots of one arena."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.never_used = 0  # slots from here on were never given out
        self.free: list[int] = []
        self.references: dict[int, int] = {}  # slot → leases that use it
        self.prefixes: dict[int, _Prefix] = {}
        self.by_key: dict[_Key, int] = {}
        self.num_children: Counter[_Key] = Counter()
        self.states: dict[
            _Key, dict[BlockHash, int]
        ] = {}  # (group, last full unit) → states after it and their lengths
        self.idle_leaves: OrderedDict[int, None] = OrderedDict()  # evictable, oldest first

    def take(self) -> int | None:
        if self.free:
            slot = self.free.pop()
        elif self.never_used < self.arena.num_slots:
            slot, self.never_used = self.never_used, self.never_used + 1
        else:
            return None
        self.arena.bump(slot)
        return slot


@dataclass(frozen=True)
class PoolStats:
    """Number of slots by kind, over all arenas."""

    slots_by_kind: dict[str, int]


class Pool:
    """All arenas of a node under one byte budget."""

    def __init__(
        self,
        budget_bytes: int,
        *,
        transfer_ratio: float = 0.5,
        on_event: Callable[[PoolEvent], None] = lambda event: None,
    ) -> None:
        self._transfer_budget = int(budget_bytes * transfer_ratio)
        self._prefix_budget = budget_bytes - self._transfer_budget
        self._budget_bytes = budget_bytes
        self._on_event = on_event
        self._slots: dict[bytes, _ArenaSlots] = {}
        self._leases: dict[LeaseId, _Lease] = {}
        self._ids = itertools.count(1)
        self._transfer_bytes = 0
        self._prefix_bytes = 0

    @property
    def arenas(self) -> list[Arena]:
        return [slots.arena for slots in self._slots.values()]

    def arena(self, layout: Layout) -> Arena:
        """The arena of a layout, made at its first use; it may grow to the whole budget but touches nothing yet."""
        slots = self._slots.get(layout.fingerprint)
        if slots is None:
            arena = Arena(layout, max(1, self._budget_bytes // stride_of(layout)))
            slots = self._slots[layout.fingerprint] = _ArenaSlots(arena)
        return slots.arena

    # Leases

    def open_lease(self, owner: str) -> LeaseId:
        lease = LeaseId(next(self._ids))
        self._leases[lease] = _Lease(owner)
        return lease

    def end_lease(self, lease: LeaseId) -> None:
        """Every use under this lease ends; ending it twice does nothing."""
        ended = self._leases.pop(lease, None)
        for slots, slot in ended.slots if ended else ():
            self._unreference(slots, slot)

    def end_owner(self, owner: str) -> None:
        """The owner is dead: all its leases end, but for quarantined ones."""
        for lease, entry in list(self._leases.items()):
            if entry.owner == owner and not entry.quarantined:
                self.end_lease(lease)

    def quarantine(self, lease: LeaseId) -> None:
        """Somebody may still write to these slots: they stay taken until `end_lease`, whatever happens to the owner."""
        self._leases[lease].quarantined = True

    def _unreference(self, slots: _ArenaSlots, slot: int) -> None:
        slots.references[slot] -= 1
        if slots.references[slot]:
            return
        del slots.references[slot]
        if slot in slots.prefixes:
            self._settle(slots, slot)
        else:
            self._transfer_bytes -= slots.arena.stride_bytes
            slots.free.append(slot)

    def _settle(self, slots: _ArenaSlots, slot: int) -> None:
        """An unused prefix block becomes evictable once no block of its chain hangs on it."""
        if slot not in slots.references and not slots.num_children[slots.prefixes[slot].key]:
            slots.idle_leaves[slot] = None

    # Blocks

    def allocate(self, arena: Arena, num_slots: int, lease: LeaseId) -> list[int] | None:
        """Transfer blocks under `lease`, or None when the transfer budget does not hold that many."""
        stride = arena.stride_bytes
        if self._transfer_bytes + num_slots * stride > self._transfer_budget:
            return None
        slots = self._slots[arena.layout.fingerprint]
        taken = [slot for slot in (slots.take() for _ in range(num_slots)) if slot is not None]
        if len(taken) < num_slots:
            slots.free += taken
            return None
        self._transfer_bytes += num_slots * stride
        slots.references.update(dict.fromkeys(taken, 1))
        self._leases[lease].slots += [(slots, slot) for slot in taken]
        return taken

    def find(self, arena: Arena, group: int, block_hash: BlockHash) -> int | None:
        """The slot of a prefix block."""
        return self._slots[arena.layout.fingerprint].by_key.get((group, block_hash))

    def states_after(self, arena: Arena, group: int, unit: BlockHash) -> dict[BlockHash, int]:
        """Linear states, with their lengths, that end within the 16 tokens after `unit` (the root, or a full unit's hash)."""
        return self._slots[arena.layout.fingerprint].states.get((group, unit), {})

    def pin(self, arena: Arena, pinned: Iterable[int], lease: LeaseId) -> None:
        """Use prefix blocks under `lease`; they are not evicted meanwhile."""
        slots = self._slots[arena.layout.fingerprint]
        for slot in pinned:
            slots.references[slot] = slots.references.get(slot, 0) + 1
            slots.idle_leaves.pop(slot, None)
            self._leases[lease].slots.append((slots, slot))

    def publish(
        self, arena: Arena, slot: int, *, group: int, block_hash: BlockHash, parent: BlockHash, num_tokens: int
    ) -> None:
        """A transfer block that is whole becomes a prefix block; an older block of the same hash stays instead."""
        slots = self._slots[arena.layout.fingerprint]
        key = (group, block_hash)
        if key in slots.by_key or not self._make_room(arena.stride_bytes):
            return
        prefix = _Prefix(key, (group, parent), num_tokens)
        slots.prefixes[slot] = prefix
        slots.by_key[key] = slot
        slots.num_children[prefix.parent] += 1
        if arena.layout.groups[group].kind == "linear_state":
            slots.states.setdefault(prefix.parent, {})[block_hash] = num_tokens
        parent_slot = slots.by_key.get(prefix.parent)
        if parent_slot is not None:
            slots.idle_leaves.pop(parent_slot, None)
        self._transfer_bytes -= arena.stride_bytes
        self._prefix_bytes += arena.stride_bytes
        self._on_event(BlockStored(arena.layout.fingerprint, group, block_hash, parent, num_tokens))

    def _make_room(self, num_bytes: int) -> bool:
        """Evict until that many bytes fit the prefix budget; False when too much is in use."""
        while self._prefix_bytes + num_bytes > self._prefix_budget:
            victim = next((slots for slots in self._slots.values() if slots.idle_leaves), None)
            if victim is None:
                return False
            self._evict(victim, next(iter(victim.idle_leaves)))
        return True

    def _evict(self, slots: _ArenaSlots, slot: int) -> None:
        del slots.idle_leaves[slot]
        prefix = slots.prefixes.pop(slot)
        del slots.by_key[prefix.key]
        slots.num_children[prefix.parent] -= 1
        states = slots.states.get(prefix.parent)
        if states is not None:
            states.pop(prefix.key[1], None)
            if not states:
                del slots.states[prefix.parent]
        parent_slot = slots.by_key.get(prefix.parent)
        if parent_slot is not None:
            self._settle(slots, parent_slot)
        slots.free.append(slot)
        self._prefix_bytes -= slots.arena.stride_bytes
        self._on_event(BlockRemoved(slots.arena.layout.fingerprint, *prefix.key))

    # Facts

    def stats(self) -> PoolStats:
        prefix = sum(len(slots.prefixes) for slots in self._slots.values())
        used = sum(1 for slots in self._slots.values() for slot in slots.references if slot not in slots.prefixes)
        free = sum(len(slots.free) for slots in self._slots.values())
        return PoolStats({"prefix": prefix, "transfer": used, "free": free})

    def close(self) -> None:
        for slots in self._slots.values():
            slots.arena.close()
