"""Random histories with random deaths of owners: nothing leaks, nothing in use is lost, chains leave from the tail."""

import random
from dataclasses import dataclass, field

import pytest

from prfaas.cachepool.arena import Arena
from prfaas.cachepool.block_run import BlockIdentity
from prfaas.cachepool.capacity import NO_LIMITS, TenantShares
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.slots import LeaseId
from prfaas.hashing import root_hash
from prfaas.pool_events import BlockStored, PoolChange, PoolEvent
from prfaas.types import BlockHash
from tests.support.pool_integrity import check_integrity
from tests.support.pool_layouts import ROOT, SLOT_BYTES, hybrid, name

NUM_TRANSFER, NUM_PREFIX = 12, 16
ATTENTION, STATE = 0, 1
TENANTS = ("one", "two", "three")
SHARES = (NO_LIMITS, TenantShares(each_tenant=0.6, of_tenants={"one": 0.2}), TenantShares(learns=True, each_tenant=0.4))
Key = tuple[bytes, int, BlockHash]  # Layout, group and hash.
Where = tuple[bytes, int]  # Layout and slot.


@dataclass
class Lease:
    """A lease as the model sees it."""

    id: LeaseId
    owner: str
    written: list[tuple[Arena, int]] = field(default_factory=list)  # Slots that it was given.
    pinned: list[tuple[Arena, int]] = field(default_factory=list)
    quarantined: bool = False


class History:
    """One random history of a pool beside a model that is slow and plain."""

    def __init__(self, rng: random.Random, shares: TenantShares = NO_LIMITS) -> None:
        self.rng = rng
        self.pool = Pool(
            (NUM_TRANSFER + NUM_PREFIX) * SLOT_BYTES,
            transfer_ratio=NUM_TRANSFER / (NUM_TRANSFER + NUM_PREFIX),
            shares=shares,
            on_change=self._on_change,
        )
        self.arenas = [self.pool.arena(hybrid("one")), self.pool.arena(hybrid("two"))]
        self.leases: list[Lease] = []
        self.stored: dict[Key, BlockHash | None] = {}  # The previous block of each announced block.
        self.slots: dict[Key, int] = {}
        self.is_forgetting = False
        self.barred: set[Where] = set()  # In use when their model was forgotten.
        self.former: dict[Where, int] = {}  # Generations of barred slots that held prefix blocks.
        self.publishing: tuple[Arena, int, int, BlockHash, BlockHash] | None = None
        self.contents: dict[Where, tuple[Key, int]] = {}  # Block and generation of each pinned slot.

    def _on_change(self, change: PoolChange) -> None:
        for event in change.each():
            self._on_event(event)

    def _on_event(self, event: PoolEvent) -> None:
        key = (event.layout, event.group, event.block_hash)
        if isinstance(event, BlockStored):
            assert key not in self.stored, "stored twice"
            self.stored[key] = event.parent if event.group == ATTENTION else None
            return
        assert key in self.stored, "removed without being stored"
        assert self.publishing is not None or self.is_forgetting, "nothing else evicts"
        parents = {(layout, 0, parent) for (layout, group, _), parent in self.stored.items() if group == ATTENTION}
        states = {(layout, ATTENTION, block) for (layout, group, block) in self.stored if group == STATE}
        assert key not in parents | states, "a chain breaks in the middle"
        assert self.is_forgetting or self.slots[key] not in self._in_use(event.layout), "a block in use leaves"
        del self.stored[key]

    def _in_use(self, layout: bytes) -> set[int]:
        uses = [use for lease in self.leases for use in (*lease.written, *lease.pinned)]
        return {slot for arena, slot in uses if arena.layout.fingerprint == layout}

    def step(self) -> None:
        self.act()
        self.check()

    def act(self) -> None:
        moves = [self.open, self.allocate, self.allocate, self.publish, self.publish, self.publish, self.pin, self.pin]
        rare = self.rng.choices([self.end, self.forget], [19, 1])[0]
        self.rng.choice([*moves, self.end, self.kill_owner, self.quarantine, rare])()

    def open(self) -> None:
        if len(self.leases) < 8:
            owner = self.rng.choice("abc")
            self.leases.append(Lease(self.pool.open_lease(), owner))

    def allocate(self) -> None:
        if not self.leases:
            return
        lease, arena = self.rng.choice(self.leases), self.rng.choice(self.arenas)
        num_slots = self.rng.randrange(5)
        fits = self._num_transfer() + num_slots <= NUM_TRANSFER
        taken = self.pool.allocate(arena, 0, num_slots, lease.id)
        assert (taken is not None) == fits, "the transfer budget alone decides"
        if taken is None:
            return
        assert not set(taken) & self._in_use(arena.layout.fingerprint), "a slot is given out twice"
        held = {slot for (layout, *_), slot in self._live_slots() if layout == arena.layout.fingerprint}
        assert not set(taken) & held, "a prefix block is given out"
        lease.written += [(arena, slot) for slot in taken]
        for slot in taken:
            self.barred.discard((arena.layout.fingerprint, slot))
            self.former.pop((arena.layout.fingerprint, slot), None)

    def _num_transfer(self) -> int:
        used = {(arena.layout.fingerprint, slot) for lease in self.leases for arena, slot in lease.written}
        return len(used - {(layout, slot) for (layout, *_), slot in self._live_slots()} - self.former.keys())

    def _live_slots(self) -> list[tuple[Key, int]]:
        return [(key, self.slots[key]) for key in self.stored]

    def publish(self) -> None:
        writing = [lease for lease in self.leases if lease.written]
        if not writing:
            return
        arena, slot = self.rng.choice(self.rng.choice(writing).written)
        number = self.rng.randrange(1, 40)
        group = self.rng.choice([ATTENTION, ATTENTION, STATE])
        layout, block = arena.layout.fingerprint, name(number)
        parent = ROOT if number < 4 else name(number // 2)  # The numbers form a tree.
        key = (layout, group, block)
        occupied = key in self.stored or (layout, slot) in {
            (stored_key[0], where) for stored_key, where in self._live_slots()
        }
        self.publishing = (arena, slot, group, block, parent)
        stored = self.pool.publish(
            arena,
            slot,
            BlockIdentity(group, block, parent, 32 * _depth_of(number), parent, _tenant_of(number, arena.layout.model)),
        )
        self.publishing = None
        assert not (stored and (layout, slot) in self.barred), "what was forgotten while it was written is found"
        assert not (stored and occupied), "a duplicate replaced an older block"
        if stored:
            self.slots[key] = slot

    def pin(self) -> None:
        if not self.leases or not self.stored:
            return
        layout, group, block = self.rng.choice(sorted(self.stored))
        arena = next(arena for arena in self.arenas if arena.layout.fingerprint == layout)
        slot = self.pool.find(arena, group, block)
        assert slot is not None
        lease = self.rng.choice(self.leases)
        self.pool.pin(arena, [slot], lease.id)
        lease.pinned.append((arena, slot))
        self.contents[layout, slot] = ((layout, group, block), arena.generation(slot))

    def end(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.rng.randrange(len(self.leases)))
            self.pool.end_lease(lease.id)

    def kill_owner(self) -> None:
        owner = self.rng.choice("abc")
        for lease in [lease for lease in self.leases if lease.owner == owner and not lease.quarantined]:
            self.pool.end_lease(lease.id)
            self.leases.remove(lease)

    def quarantine(self) -> None:
        if self.leases:
            lease = self.rng.choice(self.leases)
            self.pool.quarantine(lease.id)
            lease.quarantined = True

    def forget(self) -> None:
        """All of one model, whoever uses it."""
        arena = self.rng.choice(self.arenas)
        layout = arena.layout.fingerprint
        held = {slot for (model, *_), slot in self._live_slots() if model == layout}
        self.is_forgetting = True
        assert self.pool.forget(arena.layout.model) == len(held) * SLOT_BYTES
        self.is_forgetting = False
        assert not any(model == layout for model, *_ in self.stored), "a block is remembered"
        self.contents = {where: content for where, content in self.contents.items() if where[0] != layout}
        self.barred |= {(layout, slot) for slot in self._in_use(layout)}
        self.former |= {(layout, slot): arena.generation(slot) for slot in held & self._in_use(layout)}

    def check(self) -> None:
        check_integrity(self.pool)
        for arena in self.arenas:
            for group in (ATTENTION, STATE):
                found = {number for number in range(1, 40) if self.pool.find(arena, group, name(number)) is not None}
                announced = {
                    number for number in range(1, 40) if (arena.layout.fingerprint, group, name(number)) in self.stored
                }
                assert found == announced, "the events tell another story than the pool"
        self._check_pinned()
        assert len(self.stored) <= NUM_PREFIX
        kinds = self.pool.stats().slots_by_kind
        assert kinds["prefix"] == len(self.stored)
        num_former = kinds["transfer"] + kinds["quarantined"] - self._num_transfer()
        assert num_former >= self._num_former(), "a slot leaves before its last use has ended"
        assert not num_former or self.former, "a slot is counted twice"

    def _num_former(self) -> int:
        """Blocks in use that were forgotten."""
        in_use = {
            (arena.layout.fingerprint, slot) for arena in self.arenas for slot in self._in_use(arena.layout.fingerprint)
        }
        return len(self.former.keys() & in_use)

    def _check_pinned(self) -> None:
        pinned = {(arena.layout.fingerprint, slot) for lease in self.leases for arena, slot in lease.pinned}
        self.contents = {where: content for where, content in self.contents.items() if where in pinned}
        by_layout = {arena.layout.fingerprint: arena for arena in self.arenas}
        for (layout, slot), (key, generation) in self.contents.items():
            assert self.slots[key] == slot and key in self.stored, "a pinned block left"
            assert by_layout[layout].generation(slot) == generation, "a pinned slot was given to another block"
        for (layout, slot), generation in self.former.items():
            is_used = slot in self._in_use(layout)
            assert not is_used or by_layout[layout].generation(slot) == generation, "a slot changed under its users"

    def end_everything(self) -> None:
        while self.leases:
            self.end()
        self.check()
        kinds = self.pool.stats().slots_by_kind
        assert self._num_transfer() == kinds["transfer"] == kinds["quarantined"] == 0


def _depth_of(number: int) -> int:
    """Return the depth of a block in its tree."""
    return 1 if number < 4 else 1 + _depth_of(number // 2)


def _tenant_of(number: int, model: str) -> BlockHash:
    """Three tenants, one for each of the trees that the first three numbers are the roots of."""
    while number >= 4:
        number //= 2
    return root_hash(model, TENANTS[number - 1].encode())


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_keep_every_invariant(seed: int) -> None:
    history = History(random.Random(seed), SHARES[seed % len(SHARES)])
    try:
        for _ in range(400):
            history.step()
        history.end_everything()
    finally:
        history.pool.close()


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ten_million_operations_leak_nothing() -> None:
    histories = [History(random.Random(7), shares) for shares in SHARES]
    for number in range(10_000_000):
        history = histories[number % len(histories)]
        history.act() if number % 1_000 else history.step()
    for history in histories:
        history.end_everything()
        history.pool.close()
