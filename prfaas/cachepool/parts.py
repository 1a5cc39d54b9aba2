"""What lies where in one layer's block: named axes that ranks of unlike tensor-parallel sizes share (pure).

A layer's payload is a few *parts*, each an array whose axes count what the whole model counts: heads, channels, tokens.
A rank's part covers a range of one axis, so that what two ranks have in common is an intersection of ranges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from prfaas.cachepool.layout import KVGroup, LayerSlice, Layout
from prfaas.errors import LayoutError

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}
_ATTENTION_AXES = ("head", "token", "content")


@dataclass(frozen=True)
class Axis:
    """Indices [first, first + count) of the model's, `stride_bytes` apart."""

    name: str
    first: int
    count: int
    stride_bytes: int

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass(frozen=True)
class Part:
    """An array within a block; parts of one name, on whatever rank, are ranges of one and the same array.

    The first axis is the one that ranks share out, `item_bytes` lie together and are never cut. A state's ranges suppose
    that each rank has a share of its own.
    """

    name: str
    offset_bytes: int
    axes: tuple[Axis, ...]
    item_bytes: int


def layer_parts(layout: Layout, group: KVGroup, layer: LayerSlice, *, first_token: int = 0) -> tuple[Part, ...]:
    """The parts of a layer in a block whose first token is the request's `first_token`; offsets count from the slot's start.

    Raises:
        LayoutError: how the layer lies in its block is not known; the message names it.
    """
    if group.kind == "linear_state":
        return tuple(_state_parts(layout, layer))
    return tuple(_attention_parts(layout, group, layer, first_token))


def is_packed(layout: Layout) -> bool:
    """Whether the kernels pack the tokens of a block, head by head, in an order that depends on the processor."""
    return "; cpu;" in f"; {layout.packing};"


def _attention_parts(layout: Layout, group: KVGroup, layer: LayerSlice, first_token: int) -> Iterator[Part]:
    counts, strides, pieces = _attention_axes(group, layer)
    if is_packed(layout):
        yield _packed(layer, counts["head"])
        return
    heads = Axis("head", layer.first_head, counts["head"], strides["head"])
    for piece in range(pieces):
        tokens = Axis("token", first_token + piece * counts["token"], counts["token"], strides["token"])
        offset = layer.offset_bytes + piece * (layer.payload_bytes // pieces)
        yield Part("kv", offset, (heads, tokens), counts["content"] * strides["content"])


def _packed(layer: LayerSlice, num_heads: int) -> Part:
    """A block of which nothing but whole heads can be told apart."""
    if num_heads > 1 and not layer.axis_order.startswith("head,"):
        raise LayoutError(f"layer {layer.name}: the kernels pack a block whose heads do not each lie together")
    size = layer.payload_bytes // num_heads
    return Part("packed", layer.offset_bytes, (Axis("head", layer.first_head, num_heads, size),), size)


def _attention_axes(group: KVGroup, layer: LayerSlice) -> tuple[dict[str, int], dict[str, int], int]:
    """Counts and strides in bytes of head, token and content, and how many kernel blocks a block has."""
    order, _, shape = layer.axis_order.partition(" ")
    names = tuple(its for its in order.split(",") if its != "kernel_block")
    item, sizes = _item_bytes(layer, layer.dtype), _numbers(layer, shape)
    if sorted(names) != sorted(_ATTENTION_AXES) or len(sizes) < len(names):
        raise LayoutError(f"layer {layer.name}: axes {layer.axis_order!r} are not those of attention")
    if "kernel_block" in order and not order.startswith("kernel_block,"):
        raise LayoutError(f"layer {layer.name}: kernel blocks do not lie one after the other ({order})")
    counts = dict(zip(_ATTENTION_AXES, sizes[-len(_ATTENTION_AXES) :], strict=True))
    strides, stride = {}, item
    for name in reversed(names):
        strides[name] = stride
        stride *= counts[name]
    pieces, rest = divmod(layer.payload_bytes, stride)
    if rest or pieces * counts["token"] != group.block_tokens or names[-1] != "content":
        raise LayoutError(f"layer {layer.name}: {layer.axis_order!r} is not a block of {group.block_tokens} tokens")
    return counts, strides, pieces


def _state_parts(layout: Layout, layer: LayerSlice) -> Iterator[Part]:
    """The arrays of a recurrent state: convolution by channel, in sections, and the recurrent part by head."""
    kind, *shapes = layer.axis_order.split(" ")
    dtypes = layer.dtype.split(" ")
    arrays = [(_numbers(layer, shape), _item_bytes(layer, its)) for shape, its in zip(shapes, dtypes, strict=False)]
    if len(shapes) != len(dtypes) or sum(prod(sizes) * item for sizes, item in arrays) != layer.payload_bytes:
        raise LayoutError(
            f"layer {layer.name}: the arrays of state {layer.axis_order!r} are not its {layer.payload_bytes} bytes"
        )
    sections = _sections(layer, kind, [sizes for sizes, _ in arrays], channels_last="conv=SD" in layout.packing)
    offset = layer.offset_bytes
    for sizes, item in arrays:
        if len(sizes) == 2:
            yield from _convolution(layout, sizes, item, offset, sections, channels_last="conv=SD" in layout.packing)
        else:
            row = prod(sizes[1:]) * item
            first = layout.shard.rank * sizes[0]
            yield Part("recurrent", offset, (Axis("head", first, sizes[0], row),), row)
        offset += prod(sizes) * item


def _sections(layer: LayerSlice, kind: str, shapes: list[list[int]], *, channels_last: bool) -> list[tuple[str, int]]:
    """Names and channels of what a convolution's state consists of on this rank, in order."""
    dimensions = [len(sizes) for sizes in shapes]
    if kind == "linear" and dimensions == [3]:
        return []
    channels = shapes[0][1 if channels_last else 0] if dimensions[:1] == [2] else 0
    if kind == "short_conv" and dimensions == [2]:
        return [("x", channels)]
    if kind in ("mamba2", "gdn_attn") and dimensions == [2, 3]:
        wide = shapes[1][0] * shapes[1][1]
        narrow, rest = divmod(channels - wide, 2)
        if narrow > 0 and not rest:
            return [("x", wide), ("B", narrow), ("C", narrow)] if kind == "mamba2" else _query_key_value(narrow, wide)
    raise LayoutError(f"layer {layer.name}: how a state of {layer.axis_order!r} is cut between ranks is not known")


def _query_key_value(key: int, value: int) -> list[tuple[str, int]]:
    return [("q", key), ("k", key), ("v", value)]


def _convolution(
    layout: Layout, sizes: list[int], item: int, offset: int, sections: list[tuple[str, int]], *, channels_last: bool
) -> Iterator[Part]:
    taps, channels = sizes if channels_last else reversed(sizes)
    tap_stride, channel_stride = (channels * item, item) if channels_last else (item, taps * item)
    for name, count in sections:
        axes = (Axis("channel", layout.shard.rank * count, count, channel_stride), Axis("tap", 0, taps, tap_stride))
        yield Part(name, offset, axes, item)
        offset += count * channel_stride


def _item_bytes(layer: LayerSlice, dtype: str) -> int:
    if dtype not in _ITEM_BYTES:
        raise LayoutError(f"layer {layer.name}: how wide {dtype} is, is not known")
    return _ITEM_BYTES[dtype]


def _numbers(layer: LayerSlice, shape: str) -> list[int]:
    sizes = shape.split("x")
    if not all(its.isdecimal() and int(its) > 0 for its in sizes):
        raise LayoutError(f"layer {layer.name}: {layer.axis_order!r} has no shape")
    return [int(its) for its in sizes]
