"""The layout: how one rank of an engine lays its KV out, as data that two machines can compare."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import msgpack

from prfaas.errors import LayoutError
from prfaas.hashing import HASH_UNIT_TOKENS
from prfaas.types import GroupKind, Shard

LAYOUT_VERSION = 1
FINGERPRINT_BYTES = 16
MAX_LAYERS = 4096  # the largest public models have about 130


@dataclass(frozen=True)
class LayerSlice:
    """Where one layer's payload of a block lies inside a slot (bytes, padding left out)."""

    name: str
    offset_bytes: int
    payload_bytes: int
    dtype: str  # as torch names it, "bfloat16"
    axis_order: str  # names of the axes of the payload, outermost first, such as "head,token,kv_dim"
    first_head: int = 0  # KV heads [first_head, first_head + num_heads) of the model
    num_heads: int = 1


@dataclass(frozen=True)
class KVGroup:
    """The layers of one kind that share a block table. A linear state's block is the state itself."""

    kind: GroupKind
    block_tokens: int
    layers: tuple[LayerSlice, ...]
    window_tokens: int | None = None  # sliding_window only

    @property
    def block_bytes(self) -> int:
        """Payload of one block over all layers of the group."""
        return sum(layer.payload_bytes for layer in self.layers)


@dataclass(frozen=True)
class Layout:
    """One rank's KV. Two ranks can exchange raw bytes if and only if their layouts are equal."""

    model: str  # identity of the weights, without anything of the layout
    packing: str  # how the kernels pack a block, for instance an instruction set; "" when plain
    shard: Shard
    groups: tuple[KVGroup, ...]

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one slot of this layout's arena: its widest group block."""
        return max(group.block_bytes for group in self.groups)

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that differ when anything in the layout differs."""
        return fingerprint_of(msgpack.packb(self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        groups = [{**_plain(group), "layers": list(map(_plain, group.layers))} for group in self.groups]
        return {"version": LAYOUT_VERSION, **_plain(self), "shard": _plain(self.shard), "groups": groups}

    @staticmethod
    def from_dict(fields: Any) -> Layout:
        """The layout that a peer or an engine described.

        Raises:
            LayoutError: a field is missing, unknown, of another type or out of range; the message names it.
        """
        return _parse_layout(fields)


def _plain(its: Layout | KVGroup | LayerSlice | Shard) -> dict[str, Any]:
    """The fields in their order, and what stands in them as it is."""
    return {name: getattr(its, name) for name in its.__dataclass_fields__}


def fingerprint_of(packed: bytes | memoryview) -> bytes:
    """The fingerprint of a layout that was packed so."""
    return hashlib.sha256(packed).digest()[:FINGERPRINT_BYTES]


def difference(ours: Layout, theirs: Layout) -> str | None:
    """What differs between two layouts, in words, or None when they are equal."""
    if ours == theirs:
        return None
    if ours.shard.size != theirs.shard.size:
        sizes = f"{ours.shard.size} here, {theirs.shard.size} there"
        return f"tensor-parallel size: {sizes}"
    for name in ("model", "packing", "shard"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return f"{name}: {mine} here, {other} there"
    if len(ours.groups) != len(theirs.groups):
        return f"number of KV groups: {len(ours.groups)} here, {len(theirs.groups)} there"
    pairs = enumerate(zip(ours.groups, theirs.groups, strict=True))
    return next(text for index, (mine, other) in pairs if (text := _group_difference(index, mine, other)))


def _group_difference(index: int, ours: KVGroup, theirs: KVGroup) -> str | None:
    for name in ("kind", "block_tokens", "window_tokens"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return f"group {index} {name}: {mine} here, {other} there"
    if len(ours.layers) != len(theirs.layers):
        return f"group {index} number of layers: {len(ours.layers)} here, {len(theirs.layers)} there"
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        for name in LayerSlice.__dataclass_fields__:
            if getattr(mine, name) != getattr(other, name):
                return f"layer {mine.name} {name}: {getattr(mine, name)} here, {getattr(other, name)} there"
    return None


def _parse_layout(fields: Any) -> Layout:
    fields = _record(
        fields, "layout", {"version": int, "model": str, "packing": str, "shard": dict, "groups": (list, tuple)}
    )
    if fields["version"] != LAYOUT_VERSION:
        raise LayoutError(f"layout version {fields['version']}: this side speaks version {LAYOUT_VERSION}")
    shard = _record(fields["shard"], "shard", {"rank": int, "size": int})
    if not 0 <= shard["rank"] < shard["size"]:
        raise LayoutError(f"shard: rank {shard['rank']} is not below size {shard['size']}")
    groups: list[KVGroup] = []
    num_left = MAX_LAYERS
    for index, group in enumerate(fields["groups"]):
        groups.append(_parse_group(index, group, most_layers=num_left))
        num_left -= len(groups[-1].layers)
    if not groups:
        raise LayoutError("groups: a layout has at least one KV group")
    return Layout(model=fields["model"], packing=fields["packing"], shard=Shard(**shard), groups=tuple(groups))


def _parse_group(index: int, fields: Any, *, most_layers: int) -> KVGroup:
    where = f"group {index}"
    types = {"kind": str, "block_tokens": int, "layers": (list, tuple), "window_tokens": (int, type(None))}
    fields = _record(fields, where, types)
    if len(fields["layers"]) > most_layers:
        raise LayoutError(f"groups: more than {MAX_LAYERS} layers")
    kind, block_tokens, window = fields["kind"], fields["block_tokens"], fields["window_tokens"]
    if kind not in get_args(GroupKind):
        raise LayoutError(f"{where} kind: {kind!r} is none of {', '.join(get_args(GroupKind))}")
    if kind != "linear_state" and (block_tokens <= 0 or block_tokens % HASH_UNIT_TOKENS):
        raise LayoutError(f"{where} block_tokens: {block_tokens} is not a positive multiple of {HASH_UNIT_TOKENS}")
    if (kind == "sliding_window") != (window is not None) or (window is not None and window <= 0):
        raise LayoutError(f"{where} window_tokens: {window} (a positive number for sliding_window, else none)")
    layers = tuple(_parse_layer(where, layer) for layer in fields["layers"])
    if not layers:
        raise LayoutError(f"{where} layers: a group has at least one layer")
    end = 0
    for layer in layers:
        if layer.payload_bytes <= 0 or layer.offset_bytes != end:
            raise LayoutError(f"{where} layer {layer.name}: payload of at least one byte, packed without gaps in order")
        end += layer.payload_bytes
    return KVGroup(kind=kind, block_tokens=block_tokens, layers=layers, window_tokens=window)


_LAYER: dict[str, Any] = {
    "name": str,
    "offset_bytes": int,
    "payload_bytes": int,
    "dtype": str,
    "axis_order": str,
    "first_head": int,
    "num_heads": int,
}


def _parse_layer(where: str, fields: Any) -> LayerSlice:
    return LayerSlice(**_record(fields, f"{where} layer", _LAYER))


def _record(fields: Any, where: str, types: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise LayoutError(f"{where}: a record is expected, not {type(fields).__name__}")
    if fields.keys() != types.keys():
        name = next(iter(types.keys() ^ fields.keys()))
        raise LayoutError(f"{where} {name}: {'missing' if name in types else 'unknown'}")
    for name, kind in types.items():
        if not isinstance(fields[name], kind):
            raise LayoutError(
                f"{where} {name}: {type(fields[name]).__name__} is the wrong type"
            )  # its value may be huge
    return fields
