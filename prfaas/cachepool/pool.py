"""What a pool holds, in numbers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

from prfaas.cachepool.arena import Arena, SlotMemory, stride_of
from prfaas.cachepool.block_run import BlockIdentity, BlockRun
from prfaas.cachepool.capacity import NO_LIMITS, Capacity, TenantAccount, TenantShares
from prfaas.cachepool.eviction import ALL, POLICIES, EvictionPolicy
from prfaas.cachepool.removal import RunCut
from prfaas.cachepool.slots import LeaseId, Leases, SlotTable
from prfaas.hashing import NO_HASH
from prfaas.kv.layout import Layout
from prfaas.pool_events import BlocksRemoved, BlocksStored, PoolChange, Tier
from prfaas.types import BlockHash


@dataclass(frozen=True)
class PoolStats:
    """Number of slots by kind, over all arenas: prefix, transfer, quarantined and free are apart from each other."""

    slots_by_kind: dict[str, int]
    prefix_bytes: int
    transfer_bytes: int
    num_leases: int
    num_evicted: int
    newcomer_bytes: int  # of the prefix bytes: what nobody has asked for since it was stored
    tenant_bytes: dict[str, int]  # of the prefix bytes: by tenant, for those with a limit


Memory = TypeVar("Memory", bound=SlotMemory)


class SlotPool(Generic[Memory]):
    """All arenas of one tier of a node under one byte budget."""

    def __init__(
        self,
        budget_bytes: int,
        *,
        transfer_ratio: float = 0.5,
        eviction: EvictionPolicy = "lru",
        shares: TenantShares = NO_LIMITS,
        on_change: Callable[[PoolChange], None] | None = None,
        tier: Tier = "memory",
        make_arena: Callable[[Layout, int], Memory] = Arena,  # type: ignore[assignment]  # of `Pool`, below
    ) -> None:
        self._transfer_budget = int(budget_bytes * transfer_ratio)
        self._room = Capacity(budget_bytes - self._transfer_budget, shares)
        self.budget_bytes = budget_bytes
        self._sort_key = POLICIES[eviction]
        self._on_change = on_change
        self._tier: Tier = tier
        self._make_arena = make_arena
        self._arenas: dict[bytes, Memory] = {}
        self._slots: dict[bytes, SlotTable] = {}
        self._numbered: dict[int, SlotTable] = {}
        self._numbers = itertools.count()
        self._leases = Leases()
        self._floor = 0.0  # sort key of the last block that left: what the ageing policies count from
        self._tick = 0
        self._transfer_bytes = 0
        self._num_evicted = 0

    @property
    def arenas(self) -> list[Memory]:
        return list(self._arenas.values())

    def arena(self, layout: Layout) -> Memory:
        """The arena of a layout, made at its first use; it may grow to the whole budget but touches nothing yet."""
        arena = self._arenas.get(layout.fingerprint)
        if arena is None:
            arena = self._make_arena(layout, max(1, self.budget_bytes // stride_of(layout)))
            self._arenas[layout.fingerprint] = arena
            slots = self._slots[layout.fingerprint] = SlotTable(next(self._numbers), arena)
            self._numbered[slots.number] = slots
        return arena

    def drop(self, fingerprint: bytes) -> bool:
        """Give an arena and its memory up if nothing is in it; whether it is gone."""
        slots = self._slots[fingerprint]
        if slots.never_used > len(slots.free) + len(slots.given_back):
            return False
        del self._slots[fingerprint], self._arenas[fingerprint], self._numbered[slots.number]
        slots.arena.close()
        return True

    def arena_of(self, fingerprint: bytes) -> Memory | None:
        """The arena of the layout with this fingerprint, if that has been used."""
        return self._arenas.get(fingerprint)

    def _of(self, arena: SlotMemory) -> SlotTable:
        return self._slots[arena.layout.fingerprint]

    @property
    def tables(self) -> list[SlotTable]:
        """What `removal` looks at: valid until something is published or leaves."""
        return self._all()

    def _all(self) -> list[SlotTable]:
        """From any thread."""
        return list(self._slots.values())

    # Leases

    def open_lease(self, owner: str) -> LeaseId:
        return self._leases.open(owner)

    def end_lease(self, lease: LeaseId) -> None:
        """Every use under this lease ends; ending it twice does nothing."""
        ended = self._leases.end(lease)
        for run, end in ended.read:
            run.unread(end)
            self._settle(run)
        for slots, used in ended.written:
            self._end_writing(slots, used)

    def _end_writing(self, slots: SlotTable, used: list[int]) -> None:
        for run, _, start, end in slots.stretches(used):
            if run is not None:
                run.num_written -= end - start
                self._settle(run)
            else:
                slots.put_back(used[start:end])
                self._transfer_bytes -= (end - start) * slots.arena.stride_bytes

    def quarantine(self, lease: LeaseId) -> None:
        """Somebody may still write to these slots, which nobody reads any more: until `end_lease` they count apart."""
        self._leases.quarantine(lease)

    # Transfer blocks

    def allocate(self, arena: SlotMemory, num_slots: int, lease: LeaseId) -> list[int] | None:
        """Transfer blocks under `lease`, or None when the transfer budget does not hold that many."""
        slots, num_bytes = self._of(arena), num_slots * arena.stride_bytes
        if self._transfer_bytes + num_bytes > self._transfer_budget:
            return None
        assert self._leases.is_open(lease), "blocks are allocated under a lease that has not ended"
        self._find_pages(slots, num_slots)
        taken = slots.take(num_slots)
        if taken is not None:
            self._transfer_bytes += num_bytes
            self._leases[lease].written.append((slots, taken))
        return taken

    def _find_pages(self, slots: SlotTable, num_slots: int) -> None:
        """Where memory would exceed the budget, free slots of other arenas give theirs back."""
        backed_bytes = sum(other.num_backed * other.arena.stride_bytes for other in self._all())
        excess = backed_bytes + slots.num_fresh(num_slots) * slots.arena.stride_bytes - self.budget_bytes
        for other in self._all():
            if excess <= 0:
                return
            if other is not slots and other.free and not other.arena.pinned:
                num_returned = min(len(other.free), -(-excess // other.arena.stride_bytes))
                other.give_back(num_returned)
                excess -= num_returned * other.arena.stride_bytes

    # Prefix blocks

    def find(self, arena: SlotMemory, group: int, block_hash: BlockHash) -> int | None:
        """The slot of a prefix block."""
        return self._of(arena).by_hash[group].get(block_hash)

    def find_all(self, arena: SlotMemory, group: int, hashes: Iterable[BlockHash]) -> list[int | None]:
        """The slots of prefix blocks, in the order of their hashes."""
        return list(map(self._of(arena).by_hash[group].get, hashes))

    def identity(self, arena: SlotMemory, slot: int) -> BlockIdentity:
        """What a prefix block is. Raises KeyError when the slot holds none."""
        run = self._of(arena).run_of[slot]
        if run is None:
            raise KeyError(slot)
        return run.identity(run.slots.index(slot))

    def states_after(self, arena: SlotMemory, group: int, unit: BlockHash) -> dict[BlockHash, int]:
        """Linear states, with their lengths, that end within the 16 tokens after `unit` (the root, or a full unit's hash)."""
        return self._of(arena).states[group].get(unit, {})

    def chain(self, arena: SlotMemory, end_hash: BlockHash) -> list[int]:
        """The slots of what ends with a hash in any group, and of all that it hangs on."""
        return self._of(arena).chain(end_hash)

    def pin(self, arena: SlotMemory, pinned: Iterable[int], lease: LeaseId, *, is_use: bool = True) -> None:
        """Use prefix blocks under `lease`; they are not evicted meanwhile. What is no use makes them no more valuable."""
        slots, used, read = self._of(arena), list(pinned), self._leases[lease].read
        self._tick += 1
        when = self._tick if is_use else None
        for run, position, start, end in slots.stretches(used):
            assert run is not None, "only prefix blocks can be pinned"
            last, num_asked = position + end - start, run.num_asked
            run.read(last, when)
            self._room.newcomers.used_bytes -= (run.num_asked - num_asked) * slots.arena.stride_bytes
            read.append((run, last))
            self._keep(run)

    def soft_pin(self, arena: SlotMemory, pinned: Iterable[int], *, keep: bool) -> None:
        """Prefix blocks that leave only when no other block can (or, with keep=False, like any other again)."""
        slots = self._of(arena)
        for slot in pinned:
            run = slots.run_of[slot]
            if keep and run is not None:
                slots.soft_pinned.add(slot)
            else:
                slots.soft_pinned.discard(slot)
            if run is not None:
                self._room.candidates.discard(run)
                self._settle(run)

    def publish(
        self,
        arena: SlotMemory,
        slot: int,
        *,
        group: int,
        block_hash: BlockHash,
        parent: BlockHash,
        num_tokens: int,
        before: BlockHash | None = None,
        root: BlockHash = NO_HASH,
    ) -> bool:
        """A transfer block that is whole becomes a prefix block; whether it did.

        `parent` is as `BlocksStored` has it; `before` is the hash one block earlier, where that is another one; `root` says
        whose it is. A block of the same hash that is there already stays instead. Where no room can be made the block stays
        a transfer block, and so does one of a model that was forgotten while it was being written.
        """
        slots = self._of(arena)
        if block_hash in slots.by_hash[group] or slots.run_of[slot] is not None or slot in slots.barred:
            return False
        before = parent if before is None else before
        return self._publish(
            slots, [slot], [block_hash], group=group, parent=parent, num_tokens=num_tokens, before=before, root=root
        )

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
        """`publish` for consecutive blocks of one chain, of which `num_tokens` and `parent` are the first one's."""
        slots = self._of(arena)
        if slots.is_new(run, group, hashes, parent) and self._publish(
            slots, run, hashes, group=group, parent=parent, num_tokens=num_tokens, before=parent, root=root
        ):
            return
        for slot, block_hash in zip(run, hashes, strict=True):
            self.publish(
                arena, slot, group=group, block_hash=block_hash, parent=parent, num_tokens=num_tokens, root=root
            )
            parent, num_tokens = block_hash, num_tokens + arena.layout.groups[group].block_tokens

    def _publish(
        self,
        slots: SlotTable,
        taken: Sequence[int],
        hashes: Sequence[BlockHash],
        *,
        group: int,
        parent: BlockHash,
        num_tokens: int,
        before: BlockHash,
        root: BlockHash,
    ) -> bool:
        num_bytes = len(taken) * slots.arena.stride_bytes
        above = slots.chain_parent(group, hashes[0], before)
        account = self._room.account(slots.arena.layout.model, root)
        self._keep(slots.hang(above))  # what the blocks hang on must not be what makes room for them
        has_room = self._make_room(account, num_bytes)
        holder = slots.unhang(above)
        if not has_room:
            self._settle(holder)
            return False
        self._tick += 1
        slots.store(
            taken, hashes, group=group, parent=parent, above=above, num_tokens=num_tokens, root=root, when=self._tick
        )
        self._transfer_bytes -= num_bytes
        self._room.came(account, hashes, slots.arena.stride_bytes)
        if self._on_change is not None:
            layout, block_tokens = slots.arena.layout, slots.arena.layout.groups[group].block_tokens
            self._on_change(
                BlocksStored(layout.fingerprint, group, tuple(hashes), parent, num_tokens, block_tokens, self._tier)
            )
        return True

    def restore(self, arena: SlotMemory, blocks: Mapping[int, BlockIdentity]) -> None:
        """Take up prefix blocks that slots of an arena nobody has used yet hold since an earlier life of the pool."""
        slots = self._of(arena)
        assert not slots.never_used, "only an unused arena is restored"
        lease = self.open_lease("restore")
        slots.reserve(blocks)
        self._leases[lease].written.append((slots, list(blocks)))
        self._transfer_bytes += len(blocks) * arena.stride_bytes
        for slot, block in sorted(blocks.items(), key=lambda item: item[1].num_tokens):
            self.publish(arena, slot, **asdict(block))
        self.end_lease(lease)

    # Eviction

    def _keep(self, run: BlockRun | None) -> None:
        """Take a run out of the evictable ones once its last block may not leave."""
        if run is not None and run.num_kept() == len(run):
            self._room.candidates.discard(run)

    def _settle(self, run: BlockRun | None) -> None:
        """Put a run among the evictable ones when its last block may leave; of one that is forgotten it leaves."""
        if run is None or run in self._room.candidates or run.num_kept() == len(run):
            return
        slots = self._numbered[run.arena_number]
        if slots.is_forgotten(run):
            self._cut(run, len(run) - run.num_kept())
            return
        key = self._sort_key(slots.tail_facts(run), self._floor)
        views = self._room.views(self._account_of(run), run)
        self._room.candidates.add(run, key, soft=run.slots[-1] in slots.soft_pinned, views=views)

    def _account_of(self, run: BlockRun) -> TenantAccount:
        return self._room.account(self._numbered[run.arena_number].arena.layout.model, run.root)

    def _make_room(self, account: TenantAccount, num_bytes: int) -> bool:
        """Evict until that many bytes of a tenant fit; False when what would have to leave is in use."""
        while (shortage := self._room.shortage(account, num_bytes)) is not None:
            victim = self._room.victim(shortage.view)
            if victim is None:
                return False
            run, key = victim
            self._floor = key if shortage.view == ALL else self._floor
            self._shorten(run, shortage.num_bytes)
        return True

    def _shorten(self, run: BlockRun, lacking_bytes: int) -> None:
        """Evict the last blocks of a run, no more than were used alike, as far as bytes are lacking."""
        slots = self._numbered[run.arena_number]
        first = max(run.num_kept(), run.even_tail(), slots.evenly_pinned(run))
        self._cut(run, min(len(run) - first, -(-lacking_bytes // slots.arena.stride_bytes)))

    def _cut(self, run: BlockRun, num_blocks: int) -> None:
        """Evict the last blocks of a run, which nothing keeps."""
        slots, num_asked = self._numbered[run.arena_number], run.num_asked
        is_told = slots.is_forgotten(run)
        gone, hashes = slots.cut(run, num_blocks)
        slots.put_back(gone)
        if self._tier == "ssd" and not is_told:  # which has emptied what is forgotten already
            slots.arena.bump(gone)  # or the next life of its files would find them
        num_newcomers = num_blocks - (num_asked - run.num_asked)
        self._room.left(self._account_of(run), hashes, slots.arena.stride_bytes, num_newcomers=num_newcomers)
        self._num_evicted += num_blocks
        self._settle(run if len(run) else slots.unhang(run.above))
        if self._on_change is not None and not is_told:
            self._on_change(BlocksRemoved(slots.arena.layout.fingerprint, run.group, tuple(hashes), self._tier))

    def cut(self, cuts: Iterable[RunCut]) -> int:
        """Shorten those of the runs that are this pool's, as far as their blocks are not in use; bytes that left."""
        num_bytes = 0
        for slots, run, num_left in cuts:
            num_blocks = len(run) - max(num_left, run.num_kept())
            if slots is self._numbered.get(slots.number) and num_blocks > 0:
                self._room.candidates.discard(run)
                self._cut(run, num_blocks)
                num_bytes += num_blocks * slots.arena.stride_bytes
        return num_bytes

    def forget(self, model: str) -> int:
        """Nobody finds what is stored, or being written, for a model any more: what is not in use leaves, the rest once its
        uses end. Bytes that were prefix blocks."""
        return sum(self._forget(slots) for slots in self._all() if slots.arena.layout.model == model)

    def _forget(self, slots: SlotTable) -> int:
        num_bytes, fingerprint = slots.num_blocks * slots.arena.stride_bytes, slots.arena.layout.fingerprint
        for run in slots.forget():
            self._room.candidates.discard(run)
            if self._on_change is not None:
                self._on_change(BlocksRemoved(fingerprint, run.group, tuple(reversed(run.hashes)), self._tier))
            self._settle(run)
        return num_bytes

    # Facts

    def stats(self) -> PoolStats:
        free = sum(len(slots.free) + len(slots.given_back) for slots in self._all())
        prefix = sum(slots.num_blocks for slots in self._all())
        quarantined = self._num_quarantined()
        transfer = sum(slots.never_used for slots in self._all()) - free - prefix - quarantined
        kinds = {"prefix": prefix, "transfer": transfer, "quarantined": quarantined, "free": free}
        return PoolStats(
            kinds,
            self._room.used_bytes,
            self._transfer_bytes,
            len(self._leases),
            self._num_evicted,
            self._room.newcomers.used_bytes,
            self._room.tenant_bytes(),
        )

    def _num_quarantined(self) -> int:
        """Slots that nobody reads any more as what they hold, and that somebody still uses."""
        written = [its for lease in self._leases.quarantined() for its in lease.written]
        forgotten = sum(slots.run_of[slot] is not None for slots in self._all() for slot in list(slots.barred))
        return forgotten + sum(slots.run_of[slot] is None for slots, used in written for slot in used)

    def check_integrity(self) -> None:
        """Compare all bookkeeping with what it is derived from. O(slots): for tests and diagnosis.

        Raises:
            AssertionError: something leaks, is counted twice or is evictable though it is needed.
        """
        leases = self._leases.all()
        prefix_bytes = transfer_bytes = 0
        for slots in self._all():
            written = [slot for lease in leases for its, used in lease.written if its is slots for slot in used]
            slots.check_integrity(written)
            prefix_bytes += sum(map(len, slots.runs())) * slots.arena.stride_bytes
            transfer_bytes += sum(slots.run_of[slot] is None for slot in written) * slots.arena.stride_bytes
        assert (prefix_bytes, transfer_bytes) == (self._room.used_bytes, self._transfer_bytes), "a byte count is wrong"
        assert transfer_bytes <= self._transfer_budget, "the transfer budget is exceeded"
        runs = [(run, slots) for slots in self._all() for run in slots.runs()]
        self._room.check_integrity([(run, self._account_of(run), its.arena.stride_bytes) for run, its in runs])
        counted = Counter(run for lease in leases for run, _ in lease.read)
        assert all(run.num_reads() == counted.pop(run, 0) for run, _ in runs), "uses differ from the leases' uses"
        assert not counted, "a lease reads a run that is gone"

    def close(self) -> None:
        for slots in self._all():
            slots.arena.close()


Pool = SlotPool[Arena]
