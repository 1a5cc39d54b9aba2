"""Repacking: copies that turn blocks of one engine into blocks of an engine with another layout."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from prfaas.errors import LayoutError
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout, field_difference
from prfaas.kv.parts import Axis, LayerSlice, Part, is_packed
from prfaas.types import GroupBlocks


@dataclass(frozen=True)
class Box:
    """Strided array of items that is copied from one block to another. Offsets count from the slots' starts."""

    source_offset: int
    target_offset: int
    counts: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    item_bytes: int


@dataclass(frozen=True)
class Move:
    """The same boxes for several pairs of blocks, (source, target), counted within the transfer's lists of one group."""

    position: int  # Index in the transfer's list of groups.
    source_rank: int
    target_rank: int
    pairs: tuple[tuple[int, int], ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Side:
    """Ranks of one engine, and its names for the blocks of one transfer."""

    layouts: tuple[Layout, ...]
    groups: tuple[GroupBlocks, ...]


def obstacle(source: Layout, target: Layout) -> str | None:
    """Return why blocks of `source` cannot become blocks of `target`, or None if they can.

    One rank of each side is enough: ranks of one engine differ in their heads alone.
    """
    found = field_difference(target, source, ("model", "packing"))
    if found is not None:
        return found
    if len(target.groups) != len(source.groups):
        return f"number of KV groups: {len(target.groups)} here, {len(source.groups)} there"
    try:
        for index in range(len(target.groups)):
            found = _group_obstacle(source, target, index)
            if found:
                return f"group {index}: {found}"
    except LayoutError as error:
        return str(error)
    return None


def _group_obstacle(source: Layout, target: Layout, index: int) -> str | None:
    there, here = source.groups[index], target.groups[index]
    found = field_difference(here, there, ("kind", "window_tokens"))
    if found is not None:
        return found
    if [layer.name for layer in here.layers] != [layer.name for layer in there.layers]:
        return "the layers differ"
    if is_packed(target.packing) and here.block_tokens != there.block_tokens:
        sizes = f"{here.block_tokens} tokens here, {there.block_tokens} there"
        return f"blocks of {sizes}, and this processor's kernels pack a block as a whole"
    for own_layer, peer_layer in zip(here.layers, there.layers, strict=True):
        own, peer = _layer_parts(target, here, own_layer), _layer_parts(source, there, peer_layer)
        if own_layer.dtype != peer_layer.dtype or set(map(_form, own)) != set(map(_form, peer)):
            texts = [f"{layer.dtype} {layer.axis_order}" for layer in (own_layer, peer_layer)]
            return f"layer {own_layer.name}: {texts[0]} here, {texts[1]} there"
        if here.is_state:
            for part, peer_part in zip(own, peer, strict=True):
                _state_ranges(part, target, [[peer_part]], [source])
    return None


def _form(part: Part) -> tuple[str, int, tuple[str, ...]]:
    return part.name, part.item_bytes, tuple(axis.name for axis in part.axes)


def _layer_parts(layout: Layout, group: KVGroup, layer: LayerSlice, *, first_token: int = 0) -> tuple[Part, ...]:
    return group.rules.parts(group, layer, shard=layout.shard, packing=layout.packing, first_token=first_token)


def moves(source: Side, target: Side) -> Iterator[Move]:
    """Yield everything that is copied from the blocks of `source` to those of `target`.

    Raises:
        LayoutError: a layer's order is not known, or no rank of the source holds something that the target needs.
    """
    for position, blocks in enumerate(target.groups):
        for delta, pairs in _block_pairs(source, target, position).items():
            for rank, layout in enumerate(target.layouts):
                for source_rank, boxes in _boxes(source.layouts, layout, blocks.group, delta).items():
                    yield Move(position, source_rank, rank, tuple(pairs), tuple(boxes))


def whole_blocks(source: Side, target: Side, position: int, *, num_tokens: int) -> list[bool]:
    """Return for each target block of a group whether the source's blocks hold all its tokens below `num_tokens`.

    A window may begin in the middle of a target block, which then serves this transfer and no other.
    """
    there, here = source.groups[position], target.groups[position]
    group = target.layouts[0].groups[here.group]
    if group.is_state:
        return [True] * here.num_blocks
    peer_tokens = source.layouts[0].groups[there.group].block_tokens
    start, end = there.first_block * peer_tokens, (there.first_block + there.num_blocks) * peer_tokens
    firsts = [(here.first_block + block) * group.block_tokens for block in range(here.num_blocks)]
    return [start <= first and min(num_tokens, first + group.block_tokens) <= min(num_tokens, end) for first in firsts]


def _block_pairs(source: Side, target: Side, position: int) -> dict[int, list[tuple[int, int]]]:
    """Return (source, target) pairs of blocks that share tokens, by the source block's first token within the target's."""
    there, here = source.groups[position], target.groups[position]
    group = target.layouts[0].groups[here.group]
    if group.is_state:
        return {0: [(0, 0)]}
    own_tokens, peer_tokens = group.block_tokens, source.layouts[0].groups[there.group].block_tokens
    found: dict[int, list[tuple[int, int]]] = {}
    for block in range(here.num_blocks):
        first = (here.first_block + block) * own_tokens
        for number in range(first // peer_tokens, -(-(first + own_tokens) // peer_tokens)):
            if 0 <= number - there.first_block < there.num_blocks:
                found.setdefault(number * peer_tokens - first, []).append((number - there.first_block, block))
    return found


def _boxes(sources: Sequence[Layout], target: Layout, index: int, delta: int) -> dict[int, list[Box]]:
    """Return by source rank what a block of group `index` takes from a block that begins `delta` tokens after it."""
    found: dict[int, list[Box]] = {}
    group = target.groups[index]
    for number, layer in enumerate(group.layers):
        held = [
            _layer_parts(source, source.groups[index], source.groups[index].layers[number], first_token=delta)
            for source in sources
        ]
        for target_part in _layer_parts(target, group, layer):
            part = target_part
            matching = [[candidate for candidate in parts if candidate.name == part.name] for parts in held]
            if group.is_state:
                part, matching = _state_ranges(part, target, matching, sources)
            for rank, first, end in _source_ranges(part.axes[0], [parts[0].axes[0] for parts in matching]):
                for holder in _holders(rank, matching):
                    boxes = (_box(source_part, part, first, end) for source_part in matching[holder])
                    found.setdefault(holder, []).extend(box for box in boxes if box is not None)
    return found


def _holders(rank: int, held: Sequence[Sequence[Part]]) -> list[int]:
    """Return `rank` and the ranks with other pieces of the same heads or channels."""
    first_by_range: dict[tuple[tuple[int, int], ...], int] = {}
    for number, parts in enumerate(held):
        if parts[0].axes[0] == held[rank][0].axes[0]:
            ranges = tuple((axis.first, axis.count) for part in parts for axis in part.axes)
            first_by_range.setdefault(ranges, number)
    return list(first_by_range.values())


def _state_ranges(
    part: Part, target: Layout, held: Sequence[Sequence[Part]], sources: Sequence[Layout]
) -> tuple[Part, list[list[Part]]]:
    """Return the parts of a state with their true ranges: the whole axis if every rank has a copy of it.

    Raises:
        LayoutError: the ranks' shares do not add up to the same whole on both sides.
    """
    own, peer = part.axes[0].count, held[0][0].axes[0].count
    if own * target.shard.size == peer * sources[0].shard.size:
        return part, [list(parts) for parts in held]
    # A share of each rank's own would get smaller with more ranks, so equal counts are copies.
    if own == peer:
        return _from_zero(part), [[_from_zero(source) for source in parts] for parts in held]
    sizes = f"{own} of each of {target.shard.size} ranks here, {peer} of each of {sources[0].shard.size} there"
    raise LayoutError(f"{part.axes[0].name}s of {part.name}: {sizes}")


def _from_zero(part: Part) -> Part:
    return replace(part, axes=(replace(part.axes[0], first=0), *part.axes[1:]))


def _source_ranges(target: Axis, sources: Sequence[Axis]) -> Iterator[tuple[int, int, int]]:
    """Yield (source, first, end) for consecutive indices of `target`; of several sources the first one.

    Raises:
        LayoutError: no source holds some of them.
    """
    first = target.first
    while first < target.end:
        number = next((n for n, axis in enumerate(sources) if axis.first <= first < axis.end), None)
        if number is None:
            raise LayoutError(f"no rank holds {target.name} {first}")
        end = min(target.end, sources[number].end)
        yield number, first, end
        first = end


def _box(source: Part, target: Part, first: int, end: int) -> Box | None:
    """Return the common items of two parts within [first, end) of their first axis."""
    assert source.item_bytes == target.item_bytes, "`obstacle` has not been asked"
    axes, source_offset, target_offset = [], source.offset_bytes, target.offset_bytes
    for number, (peer, own) in enumerate(zip(source.axes, target.axes, strict=True)):
        start, stop = (first, end) if number == 0 else (max(peer.first, own.first), min(peer.end, own.end))
        if start >= stop:
            return None
        source_offset += (start - peer.first) * peer.stride_bytes
        target_offset += (start - own.first) * own.stride_bytes
        if stop - start > 1:
            axes.append((stop - start, peer.stride_bytes, own.stride_bytes))
    item_bytes = target.item_bytes
    # Axes along which items lie together on both sides become part of the item.
    while dense := next((axis for axis in axes if axis[1] == axis[2] == item_bytes), None):
        axes = [axis for axis in axes if axis is not dense]
        item_bytes *= dense[0]
    counts, source_strides, target_strides = (tuple(axis[n] for axis in axes) for n in range(3))
    return Box(source_offset, target_offset, counts, source_strides, target_strides, item_bytes)
