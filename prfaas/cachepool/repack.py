"""Which bytes of an engine's blocks make the blocks of one of another tensor-parallel size (pure).

Attention is cut by token and head range, a latent that every rank holds is taken from one of them, states are cut by head
and channel range. Where kernels pack the tokens of a block only whole heads can be cut, in blocks of equal length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from prfaas.cachepool.layout import KVGroup, Layout
from prfaas.cachepool.parts import Axis, Part, is_packed, layer_parts
from prfaas.errors import LayoutError
from prfaas.types import GroupBlocks


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
    if [its.name for its in ours.layers] != [its.name for its in theirs.layers]:
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
    return [start <= its and min(num_tokens, its + group.block_tokens) <= end for its in firsts]


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
            layer_parts(its, its.groups[index], its.groups[index].layers[number], first_token=delta) for its in sources
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
        return target, [list(its) for its in sources]
    if ours == theirs:  # what a share of its own would make smaller
        return _from_zero(target), [[_from_zero(its) for its in parts] for parts in sources]
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
    axes, item_bytes = _merged([its for its in axes if its[0] > 1], target.item_bytes)
    counts, source_strides, target_strides = ([its[n] for its in axes] for n in range(3))
    return Box(source_offset, target_offset, tuple(counts), tuple(source_strides), tuple(target_strides), item_bytes)


def _merged(axes: list[tuple[int, int, int]], item_bytes: int) -> tuple[list[tuple[int, int, int]], int]:
    """Axes along which items lie together on both sides become part of the item."""
    while dense := next((its for its in axes if its[1] == its[2] == item_bytes), None):
        axes = [its for its in axes if its is not dense]
        item_bytes *= dense[0]
    return axes, item_bytes
