"""Arrays within one layer's block, with axes that ranks of different tensor-parallel sizes share."""

from dataclasses import dataclass

from prfaas.errors import LayoutError

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}
_ATTENTION_AXES = ("head", "token", "content")
SHARED_HEADS = "head_slot"  # Axis of blocks in which the bytes of a head do not lie together, such as those of NVFP4.


@dataclass(frozen=True)
class LayerSlice:
    """Position of one layer's payload of a block inside a slot, in bytes without padding."""

    name: str
    offset_bytes: int
    payload_bytes: int
    dtype: str  # A torch name, such as "bfloat16".
    axis_order: str  # Names of the payload's axes, outermost first, such as "head,token,kv_dim".
    first_head: int = 0  # The rank holds KV heads [first_head, first_head + num_heads) of the model.
    num_heads: int = 1


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

    Ranks divide the first axis among them. The `item_bytes` of an item lie together and are never cut.
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
    counts, strides, num_pieces = _attention_axes(block_tokens, layer)
    if is_packed(packing):
        return (_packed_part(layer, counts["head"]),)
    heads = Axis("head", layer.first_head, counts["head"], strides["head"])
    parts = []
    for piece in range(num_pieces):
        tokens = Axis("token", first_token + piece * counts["token"], counts["token"], strides["token"])
        offset = layer.offset_bytes + piece * (layer.payload_bytes // num_pieces)
        parts.append(Part("kv", offset, (heads, tokens), counts["content"] * strides["content"]))
    return tuple(parts)


def _packed_part(layer: LayerSlice, num_heads: int) -> Part:
    """Return the one part of a packed block, in which only complete heads can be distinguished."""
    if num_heads > 1 and not layer.axis_order.startswith("head,"):
        raise LayoutError(f"layer {layer.name}: the kernels pack a block whose heads do not each lie together")
    size = layer.payload_bytes // num_heads
    return Part("packed", layer.offset_bytes, (Axis("head", layer.first_head, num_heads, size),), size)


def _attention_axes(block_tokens: int, layer: LayerSlice) -> tuple[dict[str, int], dict[str, int], int]:
    """Return counts and strides in bytes of head, token and content, and the number of kernel blocks of a block."""
    order, _, shape = layer.axis_order.partition(" ")
    names = tuple(name for name in order.split(",") if name != "kernel_block")
    item, sizes = item_bytes(layer, layer.dtype), shape_of(layer, shape)
    if SHARED_HEADS in names:
        raise LayoutError(
            f"layer {layer.name}: the bytes of a head are spread over its block, as in NVFP4; such blocks are exchanged "
            "between equal tensor-parallel sizes and block sizes only"
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
    num_pieces, rest = divmod(layer.payload_bytes, stride)
    if rest or num_pieces * counts["token"] != block_tokens or names[-1] != "content":
        raise LayoutError(f"layer {layer.name}: {layer.axis_order!r} is not a block of {block_tokens} tokens")
    return counts, strides, num_pieces


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
