"""The layout: how one rank of an engine stores its KV, as data that two machines can compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_type_hints

import msgpack

from prfaas.errors import LayoutError
from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS, NO_HASH
from prfaas.kv.group import KVGroup, resume_step_tokens
from prfaas.kv.kinds import KINDS
from prfaas.kv.parts import LayerSlice, piece_of, with_piece
from prfaas.types import BlockHash, GroupBlocks, Prefix, Shard

LAYOUT_VERSION = 1
FINGERPRINT_BYTES = 16
OPAQUE_PACKING = "opaque"  # Blocks that another program names and arranges.
MAX_LAYERS = 4096  # The largest public models have about 130.

_LIST = (list, tuple)
_LAYOUT_FIELDS: dict[str, Any] = {"version": int, "model": str, "packing": str, "shard": dict, "groups": _LIST}
_OPTIONAL_INT = (int, type(None))
_GROUP_FIELDS: dict[str, Any] = {"kind": str, "block_tokens": int, "layers": _LIST, "window_tokens": _OPTIONAL_INT}
_LAYER_FIELDS: dict[str, Any] = get_type_hints(LayerSlice)


@dataclass(frozen=True)
class Layout:
    """One rank's KV. Two ranks can exchange raw bytes if and only if their layouts are equal."""

    model: str  # Identity of the weights, independent of the layout.
    packing: str  # How the kernels pack a block, such as an instruction set; "" when plain.
    shard: Shard
    groups: tuple[KVGroup, ...]

    @property
    def is_opaque(self) -> bool:
        """True if the block hashes come from another program, so that no prompt of the index has them."""
        return self.packing == OPAQUE_PACKING

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that differ when anything in the layout differs."""
        return hashlib.sha256(msgpack.packb(self.to_dict())).digest()[:FINGERPRINT_BYTES]

    def to_dict(self) -> dict[str, Any]:
        """Return the form that travels. Its fields and their order determine the fingerprint."""
        shard = {"rank": self.shard.rank, "size": self.shard.size}
        groups = [_to_dict(group, _GROUP_FIELDS) for group in self.groups]
        for fields in groups:
            fields["layers"] = [_to_dict(layer, _LAYER_FIELDS) for layer in fields["layers"]]
        return {
            "version": LAYOUT_VERSION,
            "model": self.model,
            "packing": self.packing,
            "shard": shard,
            "groups": groups,
        }

    @staticmethod
    def from_dict(fields: Any) -> Layout:
        """Return the layout that a peer or an engine described.

        Raises:
            LayoutError: a field is missing, unknown, of another type or out of range; the message names it.
        """
        fields = _checked_fields(fields, "layout", _LAYOUT_FIELDS)
        if fields["version"] != LAYOUT_VERSION:
            raise LayoutError(f"layout version {fields['version']}: this side speaks version {LAYOUT_VERSION}")
        shard = _checked_fields(fields["shard"], "shard", {"rank": int, "size": int})
        if not 0 <= shard["rank"] < shard["size"]:
            raise LayoutError(f"shard: rank {shard['rank']} is not below size {shard['size']}")
        groups: list[KVGroup] = []
        num_left = MAX_LAYERS
        for index, group in enumerate(fields["groups"]):
            groups.append(_parse_group(index, group, max_layers=num_left))
            num_left -= len(groups[-1].layers)
        if not groups:
            raise LayoutError("groups: a layout has at least one KV group")
        return Layout(fields["model"], fields["packing"], Shard(**shard), tuple(groups))


def _to_dict(value: KVGroup | LayerSlice, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in fields}


def _parse_group(index: int, fields: Any, *, max_layers: int) -> KVGroup:
    where = f"group {index}"
    fields = _checked_fields(fields, where, _GROUP_FIELDS)
    if len(fields["layers"]) > max_layers:
        raise LayoutError(f"groups: more than {MAX_LAYERS} layers")
    if fields["kind"] not in KINDS:
        raise LayoutError(f"{where} kind: {fields['kind']!r} is none of {', '.join(KINDS)}")
    layers = tuple(LayerSlice(**_checked_fields(layer, f"{where} layer", _LAYER_FIELDS)) for layer in fields["layers"])
    if not layers:
        raise LayoutError(f"{where} layers: a group has at least one layer")
    end = 0
    for layer in layers:
        if layer.payload_bytes <= 0 or layer.offset_bytes != end:
            raise LayoutError(f"{where} layer {layer.name}: payload of at least one byte, packed without gaps in order")
        end += layer.payload_bytes
    group = KVGroup(fields["kind"], fields["block_tokens"], layers, fields["window_tokens"])
    group.rules.check(group, where)
    return group


def _checked_fields(fields: Any, where: str, types: dict[str, Any]) -> dict[str, Any]:
    """Return a record with exactly these fields of these types. Raises LayoutError otherwise."""
    if not isinstance(fields, dict):
        raise LayoutError(f"{where}: a record is expected, not {type(fields).__name__}")
    if fields.keys() != types.keys():
        name = next(iter(types.keys() ^ fields.keys()))
        raise LayoutError(f"{where} {name}: {'missing' if name in types else 'unknown'}")
    for name, expected in types.items():
        if not isinstance(fields[name], expected):
            # The value itself may be huge, so the message leaves it out.
            raise LayoutError(f"{where} {name}: {type(fields[name]).__name__} is the wrong type")
    return fields


def siblings(layout: Layout) -> tuple[Layout, ...]:
    """Return the layouts of the ranks that hold all pieces of this rank's blocks: its own, then the others in cyclic order.

    Such ranks are consecutive. Their layouts differ in the ranks and in the numbers of the pieces alone.

    Raises:
        LayoutError: A piece is not that of this rank.
    """
    rank, size = layout.shard.rank, layout.shard.size
    pieces = {piece_of(layer) for group in layout.groups for layer in group.layers} - {(0, 1)}
    if not pieces:
        return (layout,)
    ((number, count), *others) = pieces
    if others or size % count or rank % count != number:
        raise LayoutError(f"rank {rank} of {size} cannot hold pieces {sorted(pieces)}")
    found = []
    for step in range(count):
        piece = (number + step) % count
        groups = tuple(
            replace(group, layers=tuple(with_piece(layer, piece) for layer in group.layers)) for group in layout.groups
        )
        found.append(replace(layout, shard=replace(layout.shard, rank=rank - number + piece), groups=groups))
    return tuple(found)


def difference(here: Layout, there: Layout) -> str | None:
    """Return the first difference between two layouts in words, or None when they are equal."""
    if here == there:
        return None
    if here.shard.size != there.shard.size:
        return f"tensor-parallel size: {here.shard.size} here, {there.shard.size} there"
    found = field_difference(here, there, ("model", "packing", "shard"))
    if found is not None or len(here.groups) != len(there.groups):
        return found or f"number of KV groups: {len(here.groups)} here, {len(there.groups)} there"
    for index, (own, peer) in enumerate(zip(here.groups, there.groups, strict=True)):
        found = field_difference(own, peer, ("kind", "block_tokens", "window_tokens"))
        if found is not None:
            return f"group {index} {found}"
        if len(own.layers) != len(peer.layers):
            return f"group {index} number of layers: {len(own.layers)} here, {len(peer.layers)} there"
        for own_layer, peer_layer in zip(own.layers, peer.layers, strict=True):
            found = field_difference(own_layer, peer_layer, _LAYER_FIELDS)
            if found is not None:
                return f"layer {own_layer.name} {found}"
    return None


def field_difference(here: object, there: object, names: Iterable[str]) -> str | None:
    """Return the first of these fields that differs, with both values, or None."""
    for name in names:
        own, peer = getattr(here, name), getattr(there, name)
        if own != peer:
            return f"{name}: {own} here, {peer} there"
    return None


def prefix_groups(layout: Layout, prefix: Prefix, *, root: BlockHash = NO_HASH) -> tuple[GroupBlocks, ...]:
    """Return the blocks that a node needs to resume after the prefix; `root` is the parent of the first block.

    As in a transfer, a partial last block is named by its exact length if the model has states. Without states it is
    not part of the prefix.
    """
    hashes, step_tokens = _PrefixHashes(prefix, root), resume_step_tokens(layout.groups)
    found = (
        group.rules.blocks(group, index, hashes, prefix.num_tokens, step_tokens=step_tokens)
        for index, group in enumerate(layout.groups)
    )
    return tuple(
        replace(blocks, hashes=blocks.hashes[:-1]) if blocks.hashes[-1:] == (NO_HASH,) else blocks for blocks in found
    )


class _PrefixHashes:
    """The hashes that a prefix states, in the form that KV kinds read."""

    def __init__(self, prefix: Prefix, root: BlockHash) -> None:
        self._prefix = prefix
        self._root = root

    def at(self, num_tokens: int) -> BlockHash:
        return self._prefix.end_hash if num_tokens == self._prefix.num_tokens else self._unit_end(num_tokens)

    def blocks(self, block_tokens: int, *, first_block: int, num_tokens: int) -> tuple[BlockHash, ...]:
        num_full = num_tokens // block_tokens
        ends = range((first_block + 1) * block_tokens, (num_full + 1) * block_tokens, block_tokens)
        return (*map(self._unit_end, ends), *((NO_HASH,) if num_tokens % block_tokens else ()))

    def _unit_end(self, num_tokens: int) -> BlockHash:
        end = num_tokens // HASH_UNIT_TOKENS * HASH_BYTES
        return BlockHash(self._prefix.units[end - HASH_BYTES : end]) if end else self._root


def is_well_formed(prefix: Prefix) -> bool:
    """Return whether the hashes have the number and length that a prefix of so many tokens needs."""
    has_units = len(prefix.units) == prefix.num_tokens // HASH_UNIT_TOKENS * HASH_BYTES
    return prefix.num_tokens > 0 and has_units and len(prefix.end_hash) == HASH_BYTES
