"""The slot pool: all arenas of one tier under a byte budget, with leases, prefix blocks and eviction."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from prfaas.cachepool.arena import Arena, SlotMemory, shape_of
from prfaas.cachepool.block_run import BlockIdentity, BlockRun
from prfaas.cachepool.capacity import ALL, NO_LIMITS, Capacity, TenantAccount, TenantShares
from prfaas.cachepool.slots import Lease, LeaseId, SlotTable
from prfaas.hashing import NO_HASH
from prfaas.kv.layout import Layout
from prfaas.pool_events import BlocksRemoved, BlocksStored, PoolChange, Tier
from prfaas.types import BlockHash


@dataclass(frozen=True)
class PoolStats:
    """Numbers of slots over all arenas (prefix, transfer, quarantined and free add up), leases and tenants' bytes."""

    slots_by_kind: dict[str, int]
    num_leases: int
    tenant_bytes: dict[str, int]  # Prefix blocks of each tenant with a limit.


Memory = TypeVar("Memory", bound=SlotMemory)


class SlotPool(Generic[Memory]):
    """All arenas of one tier of a node under one byte budget."""

    def __init__(
        self,
        budget_bytes: int,
        *,
        transfer_ratio: float = 0.5,
        shares: TenantShares = NO_LIMITS,
        on_change: Callable[[PoolChange], None] = lambda change: None,
        tier: Tier = "memory",
        make_arena: Callable[[Layout, int], Memory] = Arena,  # type: ignore[assignment]  # Fits `Pool`, below.
    ) -> None:
        self._transfer_budget = int(budget_bytes * transfer_ratio)
        self._capacity = Capacity(budget_bytes - self._transfer_budget, shares)
        self.budget_bytes = budget_bytes
        self._on_change = on_change
        self._tier: Tier = tier
        self._make_arena = make_arena
        self._arenas: dict[bytes, Memory] = {}
        self._slots: dict[bytes, SlotTable] = {}
        self._by_number: dict[int, SlotTable] = {}
        self._arena_numbers = itertools.count()
        self._leases: dict[LeaseId, Lease] = {}
        self._lease_ids = map(LeaseId, itertools.count(1))
        self._now = 0  # Number of uses so far, which serves as the clock.
        self._transfer_bytes = 0

    @property
    def arenas(self) -> list[Memory]:
        return list(self._arenas.values())

    def arena(self, layout: Layout) -> Memory:
        """Return the arena of a layout, made at first use. It may grow to the whole budget but touches nothing yet."""
        arena = self._arenas.get(layout.fingerprint)
        if arena is None:
            shape = shape_of(layout)
            arena = self._make_arena(layout, max(1, self.budget_bytes // shape.row_bytes) * shape.slots_per_row)
            self._arenas[layout.fingerprint] = arena
            slots = self._slots[layout.fingerprint] = SlotTable(next(self._arena_numbers), arena)
            self._by_number[slots.number] = slots
        return arena

    def drop(self, fingerprint: bytes) -> bool:
        """Close an arena if it is empty, and return whether it was."""
        slots = self._slots[fingerprint]
        if slots.never_used > slots.num_free:
            return False
        del self._slots[fingerprint], self._arenas[fingerprint], self._by_number[slots.number]
        slots.arena.close()
        return True

    def arena_of(self, fingerprint: bytes) -> Memory | None:
        """Return the arena of the layout with this fingerprint if there is one."""
        return self._arenas.get(fingerprint)

    def _slots_of(self, arena: SlotMemory) -> SlotTable:
        return self._slots[arena.layout.fingerprint]

    @property
    def tables(self) -> list[SlotTable]:
        """Slot tables of all arenas. Any thread may read this."""
        return list(self._slots.values())

    # Leases

    def open_lease(self) -> LeaseId:
        lease = next(self._lease_ids)
        self._leases[lease] = Lease()
        return lease

    def end_lease(self, lease: LeaseId) -> None:
        """End every use under this lease. A second call does nothing."""
        ended = self._leases.pop(lease, None)
        if ended is None:
            return
        for run, end in ended.read:
            run.end_read(end)
            self._settle(run)
        for slots, used in ended.written:
            self._end_writing(slots, used)

    def _end_writing(self, slots: SlotTable, used: list[int]) -> None:
        for run, _, start, end in slots.stretches(used):
            if run is not None:
                run.num_written -= end - start
                self._settle(run)
            else:
                num_slots = (end - start) * slots.num_slots_at(used[start])
                slots.put_back(used[start:end])
                self._transfer_bytes -= num_slots * slots.arena.shape.stride_bytes

    def quarantine(self, lease: LeaseId) -> None:
        """Count the lease's slots apart until `end_lease`: somebody may still write to them, but nobody reads them."""
        self._leases[lease].is_quarantined = True

    # Transfer blocks

    def allocate(self, arena: SlotMemory, group: int, num_blocks: int, lease: LeaseId) -> list[int] | None:
        """Return slots for transfer blocks under `lease`, or None when the transfer budget does not hold that many."""
        slots = self._slots_of(arena)
        num_bytes = num_blocks * slots.block_bytes(group)
        if self._transfer_bytes + num_bytes > self._transfer_budget:
            return None
        assert lease in self._leases, "blocks are allocated under a lease that has not ended"
        self._reclaim_pages(slots, group, num_blocks)
        taken = slots.take(group, num_blocks)
        if taken is not None:
            self._transfer_bytes += num_bytes
            self._leases[lease].written.append((slots, taken))
        return taken

    def take_unbacked(self, arena: SlotMemory, num_bytes: int, *, max_ratio: float) -> range:
        """Take adjacent slots without memory, of about that many bytes, until `put_back`.

        The arena gets at most `max_ratio` of the budget, so that the arenas of other ranks have room.
        """
        slots = self._slots_of(arena)
        room = self.budget_bytes - sum(table.backed_bytes for table in self.tables)
        room = min(room, int(self.budget_bytes * max_ratio) - slots.backed_bytes)
        return slots.take_never_used(max(0, min(max(num_bytes, arena.shape.row_bytes), room)))

    def put_back(self, arena: SlotMemory, taken: range) -> None:
        """Free the slots of `take_unbacked`."""
        self._slots_of(arena).put_back_unused(taken)

    def _reclaim_pages(self, slots: SlotTable, group: int, num_blocks: int) -> None:
        """Give back pages of other arenas' free rows if memory would otherwise exceed the budget.

        If free slots are too scattered for a row, blocks leave until there is one.
        """
        while (fresh_bytes := slots.fresh_bytes(group, num_blocks)) > 0:
            excess = sum(table.backed_bytes for table in self.tables) + fresh_bytes - self.budget_bytes
            for table in self.tables:
                if excess > 0 and table is not slots and table.free and not table.arena.pinned:
                    excess -= table.give_back(excess)
            if excess <= 0 or not slots.num_split_free or (run := self._capacity.victim(ALL)) is None:
                return
            self._cut(run, 1)

    # Prefix blocks

    def find(self, arena: SlotMemory, group: int, block_hash: BlockHash) -> int | None:
        """Return the slot of a prefix block."""
        return self._slots_of(arena).by_hash[group].get(block_hash)

    def find_all(self, arena: SlotMemory, group: int, hashes: Iterable[BlockHash]) -> list[int | None]:
        """Return the slots of prefix blocks, in the order of their hashes."""
        return list(map(self._slots_of(arena).by_hash[group].get, hashes))

    def identity(self, arena: SlotMemory, slot: int) -> BlockIdentity:
        """Return the identity of a prefix block. Raises KeyError when the slot holds none."""
        run = self._slots_of(arena).run_of[slot]
        if run is None:
            raise KeyError(slot)
        return run.identity(run.slots.index(slot))

    def states_after(self, arena: SlotMemory, group: int, unit: BlockHash) -> dict[BlockHash, int]:
        """Return the linear states, with their lengths, that end within 16 tokens after `unit` (a unit's hash or the root)."""
        return self._slots_of(arena).states[group].get(unit, {})

    def pin(self, arena: SlotMemory, pinned: Iterable[int], lease: LeaseId, *, is_use: bool = True) -> None:
        """Read prefix blocks under `lease`, which keeps them. Without `is_use` they leave no later for it."""
        slots, used, read = self._slots_of(arena), list(pinned), self._leases[lease].read
        self._now += 1
        for run, position, start, end in slots.stretches(used):
            assert run is not None, "only prefix blocks can be pinned"
            last, num_read = position + end - start, run.num_read
            run.begin_read(last, self._now if is_use else None)
            self._capacity.probation.used_bytes -= (run.num_read - num_read) * slots.block_bytes(run.group)
            read.append((run, last))
            self._keep(run)

    def publish(self, arena: SlotMemory, slot: int, block: BlockIdentity) -> bool:
        """Make a complete transfer block a prefix block, and return whether it became one.

        It stays a transfer block if the hash is there already, no room can be made, or its model was forgotten while
        it was written.
        """
        slots = self._slots_of(arena)
        if block.block_hash in slots.by_hash[block.group] or slots.run_of[slot] is not None or slot in slots.barred:
            return False
        return self._publish(slots, [slot], [block.block_hash], block)

    def publish_run(
        self,
        arena: SlotMemory,
        run: Sequence[int],
        *,
        group: int,
        hashes: Sequence[BlockHash],
        parent: BlockHash,
        num_tokens: int,
        root: BlockHash = NO_HASH,
    ) -> None:
        """Do `publish` for consecutive blocks of one chain; `num_tokens` and `parent` are the first block's."""
        slots = self._slots_of(arena)
        first = BlockIdentity(group, hashes[0], parent, num_tokens, parent, root)
        if slots.is_new(run, group, hashes, parent) and self._publish(slots, run, hashes, first):
            return
        for slot, block_hash in zip(run, hashes, strict=True):
            self.publish(arena, slot, BlockIdentity(group, block_hash, parent, num_tokens, parent, root))
            parent, num_tokens = block_hash, num_tokens + arena.layout.groups[group].block_tokens

    def _publish(
        self, slots: SlotTable, taken: Sequence[int], hashes: Sequence[BlockHash], first: BlockIdentity
    ) -> bool:
        layout, block_bytes = slots.arena.layout, slots.block_bytes(first.group)
        above = slots.chain_parent(first)
        account = self._capacity.account(layout.model, first.root)
        self._keep(slots.add_child(above))  # The parent must not leave to make room for its child.
        has_room = self._make_room(account, len(taken) * block_bytes)
        parent_run = slots.drop_child(above)
        if not has_room:
            self._settle(parent_run)
            return False
        self._now += 1
        slots.store(taken, hashes, first, above, self._now)
        self._transfer_bytes -= len(taken) * block_bytes
        self._capacity.add_blocks(account, hashes, block_bytes)
        group, parent, block_tokens = first.group, first.parent, layout.groups[first.group].block_tokens
        shape = (parent, first.num_tokens, block_tokens, self._tier)
        self._on_change(BlocksStored(layout.fingerprint, group, tuple(hashes), *shape))
        return True

    def restore(self, arena: SlotMemory, blocks: Mapping[int, BlockIdentity]) -> None:
        """Publish blocks that the slots of an unused arena hold since an earlier life of the pool."""
        slots = self._slots_of(arena)
        assert not slots.never_used, "only an unused arena is restored"
        lease = self.open_lease()
        slots.reserve(blocks)
        self._leases[lease].written.append((slots, list(blocks)))
        self._transfer_bytes += sum(slots.block_bytes(block.group) for block in blocks.values())
        for slot, block in sorted(blocks.items(), key=lambda item: item[1].num_tokens):
            self.publish(arena, slot, block)
        self.end_lease(lease)

    # Eviction

    def _keep(self, run: BlockRun | None) -> None:
        """Remove a run from the candidates if its last block may not leave."""
        if run is not None and run.num_kept() == len(run):
            self._capacity.candidates.discard(run)

    def _settle(self, run: BlockRun | None) -> None:
        """Add a run to the candidates if its last block may leave; of a forgotten run, free that block."""
        if run is None or run in self._capacity.candidates or run.num_kept() == len(run):
            return
        slots = self._by_number[run.arena_number]
        if slots.is_forgotten(run):
            self._cut(run, len(run) - run.num_kept())
            return
        views = self._capacity.views(self.account_of(run), run)
        self._capacity.candidates.add(run, run.tail_last_used(), views=views)

    def account_of(self, run: BlockRun) -> TenantAccount:
        """Return the account that a run's bytes count on."""
        return self._capacity.account(self._by_number[run.arena_number].arena.layout.model, run.root)

    def _make_room(self, account: TenantAccount, num_bytes: int) -> bool:
        """Evict until that many bytes of a tenant fit, and return whether they do."""
        while (shortage := self._capacity.shortage(account, num_bytes)) is not None:
            run = self._capacity.victim(shortage.view)
            if run is None:
                return False
            block_bytes = self._by_number[run.arena_number].block_bytes(run.group)
            # Only blocks that were last used together leave together.
            first = max(run.num_kept(), run.even_tail())
            self._cut(run, min(len(run) - first, -(-shortage.num_bytes // block_bytes)))
        return True

    def _cut(self, run: BlockRun, num_blocks: int) -> None:
        """Evict the last blocks of a run, which nothing keeps."""
        slots, num_read = self._by_number[run.arena_number], run.num_read
        was_forgotten = slots.is_forgotten(run)
        gone, hashes = slots.cut(run, num_blocks)
        slots.put_back(gone)
        # The next start would find the blocks in the SSD's files. Forgotten slots are bumped already.
        if self._tier == "ssd" and not was_forgotten:
            slots.arena.bump(gone)
        num_unread = num_blocks - (num_read - run.num_read)
        self._capacity.remove_blocks(self.account_of(run), hashes, slots.block_bytes(run.group), num_unread=num_unread)
        self._settle(run if len(run) else slots.drop_child(run.above))
        if not was_forgotten:
            self._on_change(BlocksRemoved(slots.arena.layout.fingerprint, run.group, tuple(hashes), self._tier))

    def forget(self, model: str) -> int:
        """Make everything that is stored or written for a model impossible to find, and return its prefix bytes.

        Blocks that are not in use leave now, the others once their uses end.
        """
        num_bytes = 0
        for slots in self.tables:
            if slots.arena.layout.model != model:
                continue
            num_bytes += slots.num_prefix * slots.arena.shape.stride_bytes
            for run in slots.forget():
                self._capacity.candidates.discard(run)
                hashes = tuple(reversed(run.hashes))
                self._on_change(BlocksRemoved(slots.arena.layout.fingerprint, run.group, hashes, self._tier))
                self._settle(run)
        return num_bytes

    def stats(self) -> PoolStats:
        """Return the pool's numbers. Any thread may call this."""
        tables = self.tables
        free = sum(slots.num_free for slots in tables)
        prefix = sum(slots.num_prefix for slots in tables)
        # Forgotten blocks in use count as quarantined too: nobody reads them any more as what they hold.
        apart = [(slots, slot) for slots in tables for slot in list(slots.barred) if slots.run_of[slot] is not None]
        written = [pair for lease in list(self._leases.values()) if lease.is_quarantined for pair in lease.written]
        apart += [(slots, slot) for slots, used in written for slot in used if slots.run_of[slot] is None]
        quarantined = sum(slots.num_slots_at(slot) for slots, slot in apart)
        transfer = sum(slots.never_used for slots in tables) - free - prefix - quarantined
        return PoolStats(
            {"prefix": prefix, "transfer": transfer, "quarantined": quarantined, "free": free},
            len(self._leases),
            self._capacity.tenant_bytes(),
        )

    def close(self) -> None:
        for slots in self.tables:
            slots.arena.close()


Pool = SlotPool[Arena]
