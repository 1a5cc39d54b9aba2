"""Linear state: a recurrent state of fixed size, valid at exactly one length."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from prfaas.errors import LayoutError
from prfaas.hashing import HASH_UNIT_TOKENS
from prfaas.kv.kinds.kind import ChainKey, KVKind, PromptHashes
from prfaas.kv.parts import Axis, LayerSlice, Part, item_bytes, shape_of
from prfaas.types import BlockHash, GroupBlocks, Shard

if TYPE_CHECKING:
    from prfaas.kv.group import KVGroup


class LinearState(KVKind):
    """State after exactly the tokens that its hash covers. It is stored and moved as one block."""

    name = "linear_state"
    is_state = True

    def first_token(self, group: KVGroup, num_tokens: int) -> int:
        return num_tokens  # The state represents all tokens, so no block of tokens is needed.

    def blocks(
        self, group: KVGroup, index: int, hashes: PromptHashes, num_tokens: int, *, step_tokens: int
    ) -> GroupBlocks:
        last_unit = hashes.at(num_tokens // HASH_UNIT_TOKENS * HASH_UNIT_TOKENS)
        return GroupBlocks(index, 0, (hashes.at(num_tokens),), last_unit)

    def num_checkpoint_blocks(self, group: KVGroup) -> int:
        return 1

    def chain_parent(
        self, group: int, block_hash: BlockHash, before: BlockHash, *, attention_group: int | None
    ) -> ChainKey | None:
        """Return the attention block that ends where the state does, which is of no use without that block."""
        return None if attention_group is None else (attention_group, block_hash)

    def parts(
        self, group: KVGroup, layer: LayerSlice, *, shard: Shard, packing: str, first_token: int
    ) -> tuple[Part, ...]:
        """Return the convolution by channel, in sections, and the recurrent state by head."""
        return tuple(_state_parts(layer, shard.rank, has_channels_last="conv=SD" in packing))


def _state_parts(layer: LayerSlice, rank: int, *, has_channels_last: bool) -> Iterator[Part]:
    state_type, *shapes = layer.axis_order.split(" ")
    dtypes = layer.dtype.split(" ")
    arrays = [(shape_of(layer, shape), item_bytes(layer, dtype)) for shape, dtype in zip(shapes, dtypes, strict=False)]
    if len(shapes) != len(dtypes) or sum(prod(sizes) * item for sizes, item in arrays) != layer.payload_bytes:
        raise LayoutError(
            f"layer {layer.name}: the arrays of state {layer.axis_order!r} do not fill {layer.payload_bytes} bytes"
        )
    sections = _sections(layer, state_type, [sizes for sizes, _ in arrays], has_channels_last=has_channels_last)
    offset = layer.offset_bytes
    for sizes, item in arrays:
        if len(sizes) == 2:
            yield from _convolution_parts(rank, sizes, item, offset, sections, has_channels_last=has_channels_last)
        else:
            row = prod(sizes[1:]) * item
            yield Part("recurrent", offset, (Axis("head", rank * sizes[0], sizes[0], row),), row)
        offset += prod(sizes) * item


def _sections(
    layer: LayerSlice, state_type: str, shapes: list[list[int]], *, has_channels_last: bool
) -> list[tuple[str, int]]:
    """Return the names and channel counts of the sections of a convolution's state on this rank, in order."""
    dimensions = [len(sizes) for sizes in shapes]
    if state_type == "linear" and dimensions == [3]:
        return []
    channels = shapes[0][1 if has_channels_last else 0] if dimensions[:1] == [2] else 0
    if state_type == "short_conv" and dimensions == [2]:
        return [("x", channels)]
    if state_type in ("mamba2", "gdn_attn") and dimensions == [2, 3]:
        wide = shapes[1][0] * shapes[1][1]
        narrow, rest = divmod(channels - wide, 2)
        if narrow > 0 and not rest:
            if state_type == "mamba2":
                return [("x", wide), ("B", narrow), ("C", narrow)]
            return [("q", narrow), ("k", narrow), ("v", wide)]
    raise LayoutError(f"layer {layer.name}: the split of a state of {layer.axis_order!r} between ranks is not known")


def _convolution_parts(
    rank: int, sizes: list[int], item: int, offset: int, sections: list[tuple[str, int]], *, has_channels_last: bool
) -> Iterator[Part]:
    taps, channels = sizes if has_channels_last else reversed(sizes)
    tap_stride, channel_stride = (channels * item, item) if has_channels_last else (item, taps * item)
    for name, count in sections:
        axes = (Axis("channel", rank * count, count, channel_stride), Axis("tap", 0, taps, tap_stride))
        yield Part(name, offset, axes, item)
        offset += count * channel_stride
