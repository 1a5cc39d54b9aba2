"""Slots of one transfer's objects in this node's pool, and the layers that workers have written into them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from prfaas.agent.engine.protocol import HELD, ReceiveReady, SendOpened
from prfaas.agent.engine.ring import RingEntry
from prfaas.agent.transfer.plan import ObjectRange, TransferPlan, is_prefix_block
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.block_run import BlockIdentity
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.slots import LeaseId
from prfaas.types import TransferId

# Called with first object, number of objects, offset and length.
BytesReady = Callable[[int, int, int, int], None]


@dataclass(frozen=True)
class Placement:
    """One slot per object, all under one lease. `held` are the objects that were prefix blocks here already."""

    pool: Pool
    plan: TransferPlan
    # One arena per rank.
    arenas: tuple[Arena, ...]
    slots: tuple[int, ...]
    held: frozenset[int]
    lease: LeaseId

    @cached_property
    def _ranges(self) -> list[ObjectRange]:
        return [objects for objects in self.plan.ranges for _ in objects.objects]

    @cached_property
    def _identities(self) -> list[BlockIdentity]:
        return [identity for objects in self.plan.ranges for identity in self.plan.identities(objects)]

    def range_of(self, index: int) -> ObjectRange:
        """Return the range that object `index` belongs to."""
        return self._ranges[index]

    def arena_of(self, index: int) -> Arena:
        """Return the arena of object `index`."""
        return self.arenas[self.range_of(index).rank]

    def identity(self, index: int) -> BlockIdentity:
        """Return the identity of object `index`."""
        return self._identities[index]

    def memory(self, index: int) -> memoryview:
        """Return the bytes of object `index` without the slot's padding; valid until `release`."""
        return self.whole_slot(index)[: self.range_of(index).group.block_bytes]

    def whole_slot(self, index: int) -> memoryview:
        """Return the slots of object `index`, padding included; valid until `release`."""
        return self.arena_of(index).slot_view(self.slots[index], self.range_of(index).blocks.group)

    def held_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield first object and number of objects for each row of held objects of one size."""
        sizes = self.plan.object_bytes
        for _, row in groupby(enumerate(sorted(self.held)), key=lambda item: (item[1] - item[0], sizes[item[1]])):
            indices = [index for _, index in row]
            yield indices[0], len(indices)

    def send_opened(self, transfer_id: TransferId, handle: int) -> SendOpened:
        """Return the message that names the slots to fill to an engine."""
        slots = [HELD if index in self.held else slot for index, slot in enumerate(self.slots)]
        return SendOpened(transfer_id, handle, self.plan.nested(slots))

    def receive_ready(self, transfer_id: TransferId) -> ReceiveReady:
        """Return the message that names the slots to read, with their generations, to an engine."""
        generations = [self.arena_of(index).generation(slot) for index, slot in enumerate(self.slots)]
        return ReceiveReady(transfer_id, self.plan.nested(list(self.slots)), self.plan.nested(generations))

    def publish(self, indices: Iterable[int]) -> None:
        """Make these complete objects, given in order, available as prefix blocks if they are hashed."""
        chain: list[int] = []
        for index in indices:
            if index in self.held or not is_prefix_block(self._identities[index].block_hash):
                continue
            if chain and not self._is_next_block(chain[-1], index):
                self._publish_chain(chain)
                chain = []
            chain.append(index)
        if chain:
            self._publish_chain(chain)

    def _is_next_block(self, last: int, index: int) -> bool:
        """Return whether object `index` is the full block after object `last`."""
        before, identity = self._identities[last], self._identities[index]
        is_full = identity.num_tokens == before.num_tokens + self.range_of(index).group.block_tokens
        follows = identity.parent == identity.before == before.block_hash
        return index == last + 1 and is_full and follows and identity.group == before.group

    def _publish_chain(self, chain: list[int]) -> None:
        arena = self.arena_of(chain[0])
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
        """End the lease: this transfer no longer reads or writes the slots."""
        self.pool.end_lease(self.lease)


def place(pool: Pool, plan: TransferPlan, arenas: tuple[Arena, ...], *, may_allocate: bool = True) -> Placement | None:
    """Pin the prefix blocks that are here, and allocate slots for the others.

    Return None if memory is short, or if a block is not here and nothing may be allocated.
    """
    lease = pool.open_lease()
    slots: list[int] = []
    held: set[int] = set()
    for objects in plan.ranges:
        arena = arenas[objects.rank]
        found = [
            pool.find(arena, objects.blocks.group, block_hash) if is_prefix_block(block_hash) else None
            for block_hash in objects.blocks.hashes
        ]
        present = [slot for slot in found if slot is not None]
        pool.pin(arena, present, lease)
        num_absent = len(found) - len(present)
        may_take = may_allocate or not num_absent
        allocated = pool.allocate(arena, objects.blocks.group, num_absent, lease) if may_take else None
        if allocated is None:
            pool.end_lease(lease)
            return None
        supply = iter(allocated)
        slots += [next(supply) if slot is None else slot for slot in found]
        held.update(objects.first_object + offset for offset, slot in enumerate(found) if slot is not None)
    return Placement(pool, plan, arenas, tuple(slots), frozenset(held), lease)


class LayerProgress:
    """Layers of a placement's blocks that workers have written. Complete blocks become prefix blocks at once."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        # One bit per layer for each object.
        self._layers: list[int] = [0] * len(placement.slots)
        self.num_incomplete = len(placement.slots) - len(placement.held)
        self._ranks_done: set[int] = set()

    def layer_ready(self, rank: int, entry: RingEntry, bytes_ready: BytesReady | None = None) -> None:
        """Record a layer that a worker has written. An entry that fits no block is ignored."""
        plan = self.placement.plan
        if entry.group >= len(plan.groups):
            return
        objects = plan.range_of(rank, entry.group)
        fits = entry.first_block + entry.num_blocks <= objects.blocks.num_blocks
        if entry.layer >= len(objects.group.layers) or not entry.num_blocks or not fits:
            return
        first, layer = objects.first_object + entry.first_block, objects.group.layers[entry.layer]
        if bytes_ready is not None:
            bytes_ready(first, entry.num_blocks, layer.offset_bytes, layer.payload_bytes)
        all_layers = (1 << len(objects.group.layers)) - 1
        indices = range(first, first + entry.num_blocks)
        completed = [index for index in indices if self._completes(index, 1 << entry.layer, all_layers)]
        self.num_incomplete -= len(completed)
        self.placement.publish(completed)

    def _completes(self, index: int, layer_bit: int, all_layers: int) -> bool:
        """Record a layer of a block; return whether it was the last missing layer of a block that is not held."""
        before = self._layers[index]
        self._layers[index] = before | layer_bit
        return before != all_layers and before | layer_bit == all_layers and index not in self.placement.held

    def rank_done(self, rank: int) -> bool:
        """Record that a rank writes nothing more; return whether all ranks are done."""
        self._ranks_done.add(rank)
        return len(self._ranks_done) == len(self.placement.plan.layouts)
