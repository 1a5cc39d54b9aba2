"""Plan of a transfer: maps each object on the wire to a block of a rank. Pure, and equal on both sides.

Objects are numbered rank by rank, in each rank group by group, and in each group block by block. The blocks of one group
and rank are thus consecutive objects. An object is one block over all layers of its group.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from prfaas.cachepool.block_run import BlockIdentity
from prfaas.errors import RemoteProtocolError
from prfaas.hashing import NO_HASH
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.types import BlockHash, GroupBlocks


@dataclass(frozen=True)
class ObjectRange:
    """Objects [first_object, first_object + num_blocks): the blocks of `blocks` on `rank`."""

    rank: int
    # Position of `blocks` in the transfer's group list.
    position: int
    first_object: int
    group: KVGroup
    blocks: GroupBlocks

    @property
    def objects(self) -> range:
        """Numbers of the objects."""
        return range(self.first_object, self.first_object + self.blocks.num_blocks)


@dataclass(frozen=True)
class TransferPlan:
    """Layouts of an engine's ranks, and the block lists of one transfer of `num_tokens` tokens."""

    layouts: tuple[Layout, ...]
    groups: tuple[GroupBlocks, ...]
    num_tokens: int

    @cached_property
    def ranges(self) -> tuple[ObjectRange, ...]:
        """All objects, one range per rank and group."""
        return tuple(self._ranges())

    def _ranges(self) -> Iterator[ObjectRange]:
        first_object = 0
        for rank, layout in enumerate(self.layouts):
            for position, blocks in enumerate(self.groups):
                yield ObjectRange(rank, position, first_object, layout.groups[blocks.group], blocks)
                first_object += blocks.num_blocks

    @cached_property
    def object_bytes(self) -> list[int]:
        """Size of each object."""
        return [objects.group.block_bytes for objects in self.ranges for _ in objects.blocks.hashes]

    @cached_property
    def total_bytes(self) -> int:
        """Size of all objects."""
        return sum(self.object_bytes)

    @cached_property
    def attention_bytes(self) -> int:
        """Size of all objects but linear states: these bytes can leave before the last forward pass ends."""
        return sum(
            objects.group.block_bytes * objects.blocks.num_blocks
            for objects in self.ranges
            if not objects.group.is_state
        )

    @property
    def fingerprints(self) -> tuple[bytes, ...]:
        """Fingerprint of each rank's layout."""
        return tuple(layout.fingerprint for layout in self.layouts)

    def range_of(self, rank: int, position: int) -> ObjectRange:
        """Return the objects of a rank and a position in the group list."""
        return self.ranges[rank * len(self.groups) + position]

    def identities(self, objects: ObjectRange) -> Iterator[BlockIdentity]:
        """Yield the identity of each block of a range, in order.

        Like a linear state, a partial last block is valid for exactly its length.
        """
        parent = objects.blocks.parent
        for index, block_hash in enumerate(objects.blocks.hashes):
            end = (objects.blocks.first_block + index + 1) * objects.group.block_tokens
            if objects.group.is_state or end > self.num_tokens:
                unit = self._last_unit or parent
                yield BlockIdentity(objects.blocks.group, block_hash, unit, self.num_tokens, parent, self.root)
            else:
                yield BlockIdentity(objects.blocks.group, block_hash, parent, end, parent, self.root)
            parent = block_hash

    @cached_property
    def root(self) -> BlockHash:
        """Hash of model and tenant, from an attention group that begins with the prompt; NO_HASH without such a group."""
        kinds = self.layouts[0].groups
        attention = (blocks for blocks in self.groups if not kinds[blocks.group].is_state)
        return next((blocks.parent for blocks in attention if not blocks.first_block), NO_HASH)

    @cached_property
    def _last_unit(self) -> BlockHash | None:
        """Hash of the last full 16-token unit, which the linear groups name as parent."""
        kinds = self.layouts[0].groups
        return next((blocks.parent for blocks in self.groups if kinds[blocks.group].is_state), None)

    def nested(self, per_object: list[int]) -> list[list[list[int]]]:
        """Return one number per object as [rank][position][block], the form in messages to engines."""
        result: list[list[list[int]]] = [[] for _ in self.layouts]
        for objects in self.ranges:
            result[objects.rank].append(per_object[objects.objects.start : objects.objects.stop])
        return result


def make_plan(layouts: tuple[Layout, ...], groups: tuple[GroupBlocks, ...], num_tokens: int) -> TransferPlan:
    """Return the plan of a transfer.

    Raises:
        RemoteProtocolError: The block lists do not fit the layouts or the length.
    """
    num_groups = min(len(layout.groups) for layout in layouts)
    for blocks in groups:
        if blocks.group >= num_groups:
            raise RemoteProtocolError("plan", f"group {blocks.group} of {num_groups}")
        group = layouts[0].groups[blocks.group]
        if group.is_state:
            fits = blocks.num_blocks == 1
        else:
            fits = blocks.first_block + blocks.num_blocks <= -(-num_tokens // group.block_tokens)
        if not fits:
            raise RemoteProtocolError(
                "plan", f"group {blocks.group}: {blocks.num_blocks} blocks do not fit {num_tokens} tokens"
            )
    return TransferPlan(layouts, groups, num_tokens)


def is_prefix_block(block_hash: BlockHash) -> bool:
    """Return whether later requests may reuse the block: it is full and hashed."""
    return block_hash != NO_HASH
