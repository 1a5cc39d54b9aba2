"""Arrays within one layer's block, with axes that ranks of different tensor-parallel sizes share."""

import re
from dataclasses import dataclass, replace

from prfaas.errors import LayoutError

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}
_ATTENTION_AXES = ("head", "token", "content")
SHARED_HEADS = "head_slot"  # Axis of blocks in which the bytes of a head do not lie together, such as those of NVFP4.
UNKNOWN_HEADS = "unknown_head"  # Axis of a rank of which the number of its heads in the model is not known.


@dataclass(frozen=True)
class LayerSlice:
    """Position of one layer's payload of a block inside a slot, in bytes without padding."""

    name: str
    offset_bytes: int
    payload_bytes: int
    dtype: str  # A torch name, such as "bfloat16".
    # Names of a block's axes, outermost first, and their sizes, such as "head,token,content 1x64x576". A third word "3/8"
    # means that the payload is the fourth of eight equal pieces of the block, which as many ranks divide among them.
    axis_order: str
    first_head: int = 0  # The rank holds KV heads [first_head, first_head + num_heads) of the model.
    num_heads: int = 1


def piece_of(layer: LayerSlice) -> tuple[int, int]:
    """Return the number of a layer's piece, and the number of pieces of a block: (0, 1) if the payload is all of it.

    Raises:
        LayoutError: The piece does not exist.
    """
    text = layer.axis_order.rpartition(" ")[2]
    if "/" not in text:
        return 0, 1
    found = re.fullmatch(r"([0-9]{1,3})/([0-9]{1,3})", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise LayoutError(f"layer {layer.name}: there is no piece {text}")
    return int(found[1]), int(found[2])


def with_piece(layer: LayerSlice, number: int) -> LayerSlice:
    """Return another rank's slice of a layer that is divided into pieces."""
    own, count = piece_of(layer)
    whole = layer.axis_order.removesuffix(f"{own}/{count}")
    return layer if count == 1 else replace(layer, axis_order=f"{whole}{number}/{count}")


@dataclass(frozen=True)
class Axis:
    """Indices [first, first + count) of the whole model's axis, `stride_bytes` apart."""

    name: str
    first: int
    count: int
    stride_bytes: int

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass(frozen=True)
class Part:
    """Array within a block. Parts of one name are ranges of the same array, whatever their rank.

    Ranks divide the first axis among them, and those with equal KV may divide the second. The `item_bytes` of an item lie
    together and are never cut.
    A state's ranges assume that each rank has a share of its own.
    """

    name: str
    offset_bytes: int
    axes: tuple[Axis, ...]
    item_bytes: int


def is_packed(packing: str) -> bool:
    """Return whether the kernels pack each head's tokens of a block in an order that depends on the processor."""
    return "; cpu;" in f"; {packing};"


def attention_parts(block_tokens: int, layer: LayerSlice, *, packing: str, first_token: int) -> tuple[Part, ...]:
    """Return the parts of an attention layer's block; offsets count from the slot's start.

    Raises:
        LayoutError: the layer's order in its block is not known; the message names it.
    """
    counts, strides, num_kernel_blocks = _attention_axes(block_tokens, layer)
    if is_packed(packing):
        return (_packed_part(layer, counts["head"]),)
    heads = Axis("head", layer.first_head, counts["head"], strides["head"])
    number, num_pieces = piece_of(layer)
    held = range(number * block_tokens // num_pieces, (number + 1) * block_tokens // num_pieces)
    parts = []
    for start in range(0, block_tokens, counts["token"]):
        first, end = max(start, held.start), min(start + counts["token"], held.stop)
        if first < end:
            tokens = Axis("token", first_token + first, end - first, strides["token"])
            kernel_block = start // counts["token"] * (layer.payload_bytes * num_pieces // num_kernel_blocks)
            offset = kernel_block + (first - start) * strides["token"] - number * layer.payload_bytes
            item = counts["content"] * strides["content"]
            parts.append(Part("kv", layer.offset_bytes + offset, (heads, tokens), item))
    return tuple(parts)


def _packed_part(layer: LayerSlice, num_heads: int) -> Part:
    """Return the one part of a packed block, in which only complete heads can be distinguished, or pieces of one head."""
    if num_heads > 1 and not layer.axis_order.startswith("head,"):
        raise LayoutError(f"layer {layer.name}: the kernels pack a block whose heads do not each lie together")
    number, num_pieces = piece_of(layer)
    size, piece = layer.payload_bytes * num_pieces // num_heads, layer.payload_bytes // num_heads
    axes = Axis("head", layer.first_head, num_heads, size), Axis("byte", number * piece, piece, 1)
    return Part(f"packed {size}", layer.offset_bytes, axes, 1)


def _attention_axes(block_tokens: int, layer: LayerSlice) -> tuple[dict[str, int], dict[str, int], int]:
    """Return counts and strides in bytes of head, token and content, and the number of kernel blocks of a whole block."""
    order, shape, *_ = [*layer.axis_order.split(" "), ""]
    names = tuple(name for name in order.split(",") if name != "kernel_block")
    item, sizes = item_bytes(layer, layer.dtype), shape_of(layer, shape)
    if SHARED_HEADS in names:
        raise LayoutError(
            f"layer {layer.name}: the bytes of a head are spread over its block, as in NVFP4; such blocks are exchanged "
            "between equal tensor-parallel sizes and block sizes only"
        )
    if UNKNOWN_HEADS in names:
        raise LayoutError(
            f"layer {layer.name}: which of the model's KV heads a rank has is not known, since other layers have more or "
            "fewer; such blocks are exchanged between equal tensor-parallel sizes and block sizes only"
        )
    if sorted(names) != sorted(_ATTENTION_AXES) or len(sizes) < len(names):
        raise LayoutError(f"layer {layer.name}: axes {layer.axis_order!r} are not those of attention")
    if "kernel_block" in order and not order.startswith("kernel_block,"):
        raise LayoutError(f"layer {layer.name}: kernel blocks do not lie one after the other ({order})")
    counts = dict(zip(_ATTENTION_AXES, sizes[-len(_ATTENTION_AXES) :], strict=True))
    strides, stride = {}, item
    for name in reversed(names):
        strides[name] = stride
        stride *= counts[name]
    _, num_pieces = piece_of(layer)
    num_kernel_blocks, rest = divmod(layer.payload_bytes * num_pieces, stride)
    if rest or num_kernel_blocks * counts["token"] != block_tokens or names[-1] != "content":
        raise LayoutError(f"layer {layer.name}: {layer.axis_order!r} is not a block of {block_tokens} tokens")
    if num_pieces > 1 and (counts["head"] > 1 or block_tokens % num_pieces):
        raise LayoutError(f"layer {layer.name}: {layer.axis_order!r} cannot be divided")
    return counts, strides, num_kernel_blocks


def item_bytes(layer: LayerSlice, dtype: str) -> int:
    """Return the bytes of one value. Raises LayoutError for an unknown dtype."""
    if dtype not in _ITEM_BYTES:
        raise LayoutError(f"layer {layer.name}: the width of {dtype} is not known")
    return _ITEM_BYTES[dtype]


def shape_of(layer: LayerSlice, shape: str) -> list[int]:
    """Return the sizes in a text such as "8x16x128". Raises LayoutError when it is none."""
    sizes = shape.split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise LayoutError(f"layer {layer.name}: {layer.axis_order!r} has no shape")
    return [int(size) for size in sizes]
