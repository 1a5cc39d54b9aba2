"""What lies where in one layer's block: named axes that ranks of unlike tensor-parallel sizes share (pure).

A layer's payload is a few *parts*, each an array whose axes count what the whole model counts: heads, channels, tokens.
A rank's part covers a range of one axis, so that what two ranks have in common is an intersection of ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from prfaas.cachepool.layout import KVGroup, LayerSlice, Layout
from prfaas.errors import LayoutError
from prfaas.types import GroupBlocks

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
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise LayoutError(f"layer {layer.name}: {layer.axis_order!r} has no shape")
    return [int(size) for size in sizes]


@dataclass(frozen=True)
class Box:
    """Bytes of one block that become bytes of another: a strided array of items. Offsets count from the slots' starts."""

    source_offset: int
    target_offset: int
    counts: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    item_bytes: int


@dataclass(frozen=True)
class Move:
    """The same boxes for several pairs of blocks, (source, target), counted within the transfer's lists of one group."""

    position: int  # in the transfer's lists of groups
    source_rank: int
    target_rank: int
    pairs: tuple[tuple[int, int], ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Side:
    """The ranks of one engine, and how it names the blocks of one transfer."""

    layouts: tuple[Layout, ...]
    groups: tuple[GroupBlocks, ...]


def obstacle(theirs: Layout, ours: Layout) -> str | None:
    """Why blocks of `theirs` cannot be made into blocks of `ours`, in words that name what is in the way; None where they can.

    One rank of each side tells: ranks of one engine differ in their heads alone.
    """
    for name in ("model", "packing"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return f"{name}: {mine} here, {other} there"
    if len(ours.groups) != len(theirs.groups):
        return f"number of KV groups: {len(ours.groups)} here, {len(theirs.groups)} there"
    try:
        for index, (mine, other) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
            found = _group_obstacle(other, mine, theirs, ours)
            if found:
                return f"group {index}: {found}"
    except LayoutError as error:
        return str(error)
    return None


def _group_obstacle(theirs: KVGroup, ours: KVGroup, there: Layout, here: Layout) -> str | None:
    for name in ("kind", "window_tokens"):
        if getattr(ours, name) != getattr(theirs, name):
            return f"{name}: {getattr(ours, name)} here, {getattr(theirs, name)} there"
    if [layer.name for layer in ours.layers] != [layer.name for layer in theirs.layers]:
        return "its layers are others here and there"
    if is_packed(here) and ours.block_tokens != theirs.block_tokens:
        sizes = f"{ours.block_tokens} tokens here, {theirs.block_tokens} there"
        return f"blocks of {sizes}, and this processor's kernels pack a block as a whole"
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        parts = layer_parts(here, ours, mine), layer_parts(there, theirs, other)
        shapes = [{(its.name, its.item_bytes, tuple(axis.name for axis in its.axes)) for its in each} for each in parts]
        if shapes[0] != shapes[1] or mine.dtype != other.dtype:
            return f"layer {mine.name}: {mine.dtype} {mine.axis_order} here, {other.dtype} {other.axis_order} there"
        if ours.kind == "linear_state":
            for target, source in zip(*parts, strict=True):
                _shared_out(target, here, [[source]], [there])
    return None


def moves(source: Side, target: Side) -> Iterator[Move]:
    """Everything that is copied from the blocks of `source` to those of `target`.

    Raises:
        LayoutError: how a layer lies is not known, or no rank of the source holds something that the target needs.
    """
    for position, blocks in enumerate(target.groups):
        for delta, pairs in _pairs(source, target, position).items():
            for rank, layout in enumerate(target.layouts):
                for source_rank, boxes in _boxes(source.layouts, layout, blocks.group, delta).items():
                    yield Move(position, source_rank, rank, tuple(pairs), tuple(boxes))


def whole_blocks(source: Side, target: Side, position: int, *, num_tokens: int) -> list[bool]:
    """Of each target block of a group, whether all its tokens below `num_tokens` are in the source's blocks.

    A window may begin in the middle of a target block, which then serves this transfer and no other.
    """
    theirs, ours = source.groups[position], target.groups[position]
    group = target.layouts[0].groups[ours.group]
    if group.kind == "linear_state":
        return [True] * ours.num_blocks
    length = source.layouts[0].groups[theirs.group].block_tokens
    start, end = theirs.first_block * length, min(num_tokens, (theirs.first_block + theirs.num_blocks) * length)
    firsts = [(ours.first_block + its) * group.block_tokens for its in range(ours.num_blocks)]
    return [start <= first and min(num_tokens, first + group.block_tokens) <= end for first in firsts]


def _pairs(source: Side, target: Side, position: int) -> dict[int, list[tuple[int, int]]]:
    """Blocks that share tokens, (source, target), by the token at which the source's begins within the target's."""
    theirs, ours = source.groups[position], target.groups[position]
    group = target.layouts[0].groups[ours.group]
    if group.kind == "linear_state":
        return {0: [(0, 0)]}
    width, length = group.block_tokens, source.layouts[0].groups[theirs.group].block_tokens
    found: dict[int, list[tuple[int, int]]] = {}
    for block in range(ours.num_blocks):
        first = (ours.first_block + block) * width
        for number in range(first // length, -(-(first + width) // length)):
            if 0 <= number - theirs.first_block < theirs.num_blocks:
                found.setdefault(number * length - first, []).append((number - theirs.first_block, block))
    return found


def _boxes(sources: Sequence[Layout], target: Layout, index: int, delta: int) -> dict[int, list[Box]]:
    """By source rank what a block of group `index` takes from one that begins `delta` tokens after it."""
    found: dict[int, list[Box]] = {}
    group = target.groups[index]
    for number, layer in enumerate(group.layers):
        held = [
            layer_parts(source, source.groups[index], source.groups[index].layers[number], first_token=delta)
            for source in sources
        ]
        for part in layer_parts(target, group, layer):
            same = [[its for its in parts if its.name == part.name] for parts in held]
            if group.kind == "linear_state":
                part, same = _shared_out(part, target, same, sources)
            for rank, first, end in _shares(part.axes[0], [its[0].axes[0] for its in same]):
                boxes = (_box(its, part, first, end) for its in same[rank])
                found.setdefault(rank, []).extend(box for box in boxes if box is not None)
    return found


def _shared_out(
    target: Part, here: Layout, sources: Sequence[Sequence[Part]], there: Sequence[Layout]
) -> tuple[Part, list[list[Part]]]:
    """The parts of a state with the ranges that they have: all of the model's, where every rank has a copy of them.

    Raises:
        LayoutError: the ranks' shares do not add up to the same whole on both sides.
    """
    ours, theirs = target.axes[0].count, sources[0][0].axes[0].count
    if ours * here.shard.size == theirs * there[0].shard.size:
        return target, [list(source) for source in sources]
    if ours == theirs:  # what a share of its own would make smaller
        return _from_zero(target), [[_from_zero(part) for part in parts] for parts in sources]
    sizes = f"{ours} of each of {here.shard.size} ranks here, {theirs} of each of {there[0].shard.size} there"
    raise LayoutError(f"{target.axes[0].name}s of {target.name}: {sizes}")


def _from_zero(part: Part) -> Part:
    return replace(part, axes=(replace(part.axes[0], first=0), *part.axes[1:]))


def _shares(target: Axis, sources: Sequence[Axis]) -> Iterator[tuple[int, int, int]]:
    """Which source gives which indices of `target`, as (source, first, end); of several that hold the same the first one.

    Raises:
        LayoutError: none holds some of them.
    """
    at = target.first
    while at < target.end:
        number = next((n for n, its in enumerate(sources) if its.first <= at < its.end), None)
        if number is None:
            raise LayoutError(f"no rank holds {target.name} {at}")
        end = min(target.end, sources[number].end)
        yield number, at, end
        at = end


def _box(source: Part, target: Part, first: int, end: int) -> Box | None:
    """What two parts have in common, within [first, end) of their first axis."""
    assert source.item_bytes == target.item_bytes, "`obstacle` has not been asked"
    counts, source_offset, target_offset = [], source.offset_bytes, target.offset_bytes
    for number, (theirs, ours) in enumerate(zip(source.axes, target.axes, strict=True)):
        start, stop = (first, end) if number == 0 else (max(theirs.first, ours.first), min(theirs.end, ours.end))
        if start >= stop:
            return None
        counts.append(stop - start)
        source_offset += (start - theirs.first) * theirs.stride_bytes
        target_offset += (start - ours.first) * ours.stride_bytes
    axes = [
        (count, theirs.stride_bytes, ours.stride_bytes)
        for count, theirs, ours in zip(counts, source.axes, target.axes, strict=True)
    ]
    axes, item_bytes = _merged([axis for axis in axes if axis[0] > 1], target.item_bytes)
    counts, source_strides, target_strides = ([axis[n] for axis in axes] for n in range(3))
    return Box(source_offset, target_offset, tuple(counts), tuple(source_strides), tuple(target_strides), item_bytes)


def _merged(axes: list[tuple[int, int, int]], item_bytes: int) -> tuple[list[tuple[int, int, int]], int]:
    """Axes along which items lie together on both sides become part of the item."""
    while dense := next((axis for axis in axes if axis[1] == axis[2] == item_bytes), None):
        axes = [axis for axis in axes if axis is not dense]
        item_bytes *= dense[0]
    return axes, item_bytes
