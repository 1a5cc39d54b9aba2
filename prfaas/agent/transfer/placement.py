"""Where the objects of one transfer lie in this node's pool."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from prfaas.agent.transfer.plan import ObjectRange, TransferPlan, is_prefix_block
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.block_run import BlockIdentity
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.slots import LeaseId


@dataclass(frozen=True)
class Placement:
    """One slot per object, all under one lease. `held` are the objects that were prefix blocks here already."""

    pool: Pool
    plan: TransferPlan
    arenas: tuple[Arena, ...]  # one per rank
    slots: tuple[int, ...]
    held: frozenset[int]
    lease: LeaseId

    @cached_property
    def _first_objects(self) -> list[int]:
        return [run.first_object for run in self.plan.runs if run.blocks.num_blocks]

    @cached_property
    def _filled_runs(self) -> list[ObjectRange]:
        return [run for run in self.plan.runs if run.blocks.num_blocks]

    @cached_property
    def _identities(self) -> list[BlockIdentity]:
        return [identity for run in self.plan.runs for identity in self.plan.identities(run)]

    def run_of(self, index: int) -> ObjectRange:
        """The run that object `index` belongs to."""
        return self._filled_runs[bisect_right(self._first_objects, index) - 1]

    def identity(self, index: int) -> BlockIdentity:
        """What object `index` is."""
        return self._identities[index]

    def memory(self, index: int) -> memoryview:
        """The bytes of object `index`, without the slot's padding; valid until `release`."""
        return self.whole_slot(index)[: self.run_of(index).group.block_bytes]

    def whole_slot(self, index: int) -> memoryview:
        """The slot of object `index`, padding included; valid until `release`."""
        return self.arenas[self.run_of(index).rank].slot_view(self.slots[index])

    def held_stretches(self) -> Iterator[tuple[int, int]]:
        """First object and number of objects of all that is held; those in a row of one size are one."""
        sizes = self.plan.object_bytes
        stretches = groupby(enumerate(sorted(self.held)), key=lambda its: (its[1] - its[0], sizes[its[1]]))
        for _, numbered in stretches:
            indices = [index for _, index in numbered]
            yield indices[0], len(indices)

    def generations(self) -> list[int]:
        return [self.arenas[self.run_of(index).rank].generation(slot) for index, slot in enumerate(self.slots)]

    def publish(self, indices: Iterable[int]) -> None:
        """These objects, in order, are whole: those that are hashed may be reused by later requests."""
        chain: list[int] = []
        for index in indices:
            identity = self._identities[index]
            if index in self.held or not is_prefix_block(identity.block_hash):
                continue
            if chain and not self._continues(chain[-1], index):
                self._publish_chain(chain)
                chain = []
            chain.append(index)
        if chain:
            self._publish_chain(chain)

    def _continues(self, last: int, index: int) -> bool:
        """Whether object `index` is the full block that comes after object `last`."""
        before, identity = self._identities[last], self._identities[index]
        is_full = identity.num_tokens == before.num_tokens + self.run_of(index).group.block_tokens
        follows = identity.parent == identity.before == before.block_hash
        return index == last + 1 and is_full and follows and identity.group == before.group

    def _publish_chain(self, chain: list[int]) -> None:
        arena = self.arenas[self.run_of(chain[0]).rank]
        first = self._identities[chain[0]]
        if len(chain) == 1:
            self.pool.publish(arena, self.slots[chain[0]], first)
            return
        self.pool.publish_run(
            arena,
            self.slots[chain[0] : chain[-1] + 1],
            group=first.group,
            hashes=[self._identities[index].block_hash for index in chain],
            parent=first.parent,
            num_tokens=first.num_tokens,
            root=first.root,
        )

    def release(self) -> None:
        """Nobody reads or writes these slots for this transfer any more."""
        self.pool.end_lease(self.lease)


def place(pool: Pool, plan: TransferPlan, arenas: tuple[Arena, ...], *, owner: str) -> Placement | None:
    """Pin the prefix blocks that are here already, take transfer blocks for the others; None when memory is short."""
    return _place(pool, plan, arenas, owner=owner, fill=True)


def place_held(pool: Pool, plan: TransferPlan, arenas: tuple[Arena, ...], *, owner: str) -> Placement | None:
    """Pin prefix blocks that are all here; None when one is not."""
    return _place(pool, plan, arenas, owner=owner, fill=False)


def _place(pool: Pool, plan: TransferPlan, arenas: tuple[Arena, ...], *, owner: str, fill: bool) -> Placement | None:
    lease = pool.open_lease(owner)
    slots: list[int] = []
    held: set[int] = set()
    for run in plan.runs:
        arena = arenas[run.rank]
        found = [_find(pool, arena, run, position) for position in range(run.blocks.num_blocks)]
        present = [slot for slot in found if slot is not None]
        pool.pin(arena, present, lease)
        num_absent = len(found) - len(present)
        fresh = pool.allocate(arena, num_absent, lease) if fill or not num_absent else None
        if fresh is None:
            pool.end_lease(lease)
            return None
        supply = iter(fresh)
        slots += [next(supply) if slot is None else slot for slot in found]
        held.update(run.first_object + offset for offset, slot in enumerate(found) if slot is not None)
    return Placement(pool, plan, arenas, tuple(slots), frozenset(held), lease)


def _find(pool: Pool, arena: Arena, run: ObjectRange, position: int) -> int | None:
    block_hash = run.blocks.hashes[position]
    return pool.find(arena, run.blocks.group, block_hash) if is_prefix_block(block_hash) else None
