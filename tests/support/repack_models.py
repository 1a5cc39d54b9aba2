"""Small models as their tensor-parallel ranks hold them: each byte says which layer, head and token it is of."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prfaas.hashing import NO_HASH
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.types import GroupBlocks, Shard

CONTENT, WIDTH = 4, 2  # Values of a head and token, and bytes of each value.
TAPS, ROW = 3, 2  # Taps of a convolution, and four-byte values of one head's recurrent state.


@dataclass(frozen=True)
class Cut:
    """One engine's layout of a model: ranks, block length, and physical order of an attention block's axes."""

    size: int = 1
    block_tokens: int = 32
    order: str = "head,token,content"
    packing: str = ""
    channels_last: bool = True
    num_drafts: int = 0  # A convolution's state has as many further taps, which hold nothing at the end of a prompt.

    @property
    def packed(self) -> str:
        return f"{self.packing}; conv={'SD' if self.channels_last else 'DS'}"


def value(*place: object, size: int) -> bytes:
    """The bytes at a place of the model."""
    return hashlib.shake_128(repr(place).encode()).digest(size)


@dataclass(frozen=True)
class Attention:
    """Layers of attention with so many KV heads; a latent has one, which every rank holds.

    Ranks with the same head hold a piece of its blocks each if the layers are `divided`.
    """

    num_heads: int
    num_layers: int = 2
    kind: str = "full_attention"
    window_tokens: int | None = None
    divided: bool = False

    def heads(self, cut: Cut, rank: int) -> range:
        count = max(1, self.num_heads // cut.size)
        first = min(rank * self.num_heads // cut.size, self.num_heads - count)
        return range(first, first + count)

    def num_pieces(self, cut: Cut) -> int:
        return max(1, cut.size // self.num_heads) if self.divided else 1

    def group(self, cut: Cut, rank: int) -> KVGroup:
        heads, pieces = self.heads(cut, rank), self.num_pieces(cut)
        size = len(heads) * cut.block_tokens * CONTENT * WIDTH // pieces
        axes = f"{cut.order} {len(heads)}x{cut.block_tokens}x{CONTENT}"
        axes += f" {rank % pieces}/{pieces}" if pieces > 1 else ""
        layers = tuple(
            LayerSlice(f"attention.{n}", n * size, size, "bfloat16", axes, heads.start, len(heads))
            for n in range(self.num_layers)
        )
        return KVGroup(self.kind, cut.block_tokens, layers, self.window_tokens)

    def block(self, cut: Cut, rank: int, first_token: int) -> bytes:
        """A whole block, or the rank's piece of each layer, written out in its physical order."""
        return b"".join(self._layer(cut, rank, first_token, layer) for layer in range(self.num_layers))

    def _layer(self, cut: Cut, rank: int, first_token: int, layer: int) -> bytes:
        heads, count = self.heads(cut, rank), cut.block_tokens // self.num_pieces(cut)
        first_token += rank % self.num_pieces(cut) * count
        tokens = range(first_token, first_token + count)
        cells = ((h, t) for h in heads for t in tokens)
        if cut.order.startswith("token"):
            cells = ((h, t) for t in tokens for h in heads)
        return b"".join(value(layer, h, t, size=CONTENT * WIDTH) for h, t in cells)


@dataclass(frozen=True)
class State:
    """Layers of a recurrent state: heads, and groups of B and C (a Mamba2 with one has a copy of it on every rank)."""

    kind: str  # A name of vLLM.
    num_heads: int = 8
    num_groups: int = 8
    num_layers: int = 2

    def group(self, cut: Cut, rank: int) -> KVGroup:
        heads = self.num_heads // cut.size
        channels = sum(len(values) for _, values in self._sections(cut, rank))
        taps = TAPS + cut.num_drafts
        convolution = f"{taps}x{channels}" if cut.channels_last else f"{channels}x{taps}"
        recurrent = f"{heads}x{ROW}x1"
        shapes = {"short_conv": [convolution], "linear": [recurrent]}.get(self.kind, [convolution, recurrent])
        dtypes = " ".join("float32" if shape == recurrent else "bfloat16" for shape in shapes)
        size = len(self._layer(cut, rank, 0))
        layers = tuple(
            LayerSlice(f"state.{n}", n * size, size, dtypes, " ".join([self.kind, *shapes]))
            for n in range(self.num_layers)
        )
        return KVGroup("linear_state", 16, layers)

    def _sections(self, cut: Cut, rank: int) -> Iterator[tuple[str, range]]:
        """Names and the model's channels of this rank's convolution, in order."""
        if self.kind == "linear":
            return
        wide = _share(self.num_heads * ROW, cut.size, rank)
        if self.kind == "short_conv":
            yield "x", wide
            return
        narrow = range(3) if self.num_groups == 1 else _share(self.num_groups * 3, cut.size, rank)
        order = (("x", wide), ("B", narrow), ("C", narrow))
        yield from order if self.kind == "mamba2" else (("q", narrow), ("k", narrow), ("v", wide))

    def block(self, cut: Cut, rank: int, first_token: int) -> bytes:
        return b"".join(self._layer(cut, rank, layer) for layer in range(self.num_layers))

    def _layer(self, cut: Cut, rank: int, layer: int) -> bytes:
        channels = [(name, values) for name, all_ in self._sections(cut, rank) for values in all_]
        taps = range(TAPS + cut.num_drafts)
        by_channel = [(c, tap) for c in channels for tap in taps]
        cells = [(c, tap) for tap in taps for c in channels] if cut.channels_last else by_channel
        convolution = b"".join(value(layer, c, tap, size=WIDTH) if tap < TAPS else bytes(WIDTH) for c, tap in cells)
        if self.kind == "short_conv":
            return convolution
        heads = _share(self.num_heads, cut.size, rank)
        return convolution + b"".join(value(layer, "head", h, size=4 * ROW) for h in heads)


def _share(total: int, size: int, rank: int) -> range:
    return range(rank * total // size, (rank + 1) * total // size)


Group = Attention | State


def layouts(groups: Sequence[Group], cut: Cut) -> tuple[Layout, ...]:
    return tuple(
        Layout("m", cut.packed, Shard(rank, cut.size), tuple(group.group(cut, rank) for group in groups))
        for rank in range(cut.size)
    )


def block_lists(groups: Sequence[Group], cut: Cut, num_tokens: int) -> tuple[GroupBlocks, ...]:
    """The blocks that resuming after `num_tokens` needs."""
    found = []
    for index, group in enumerate(groups):
        if isinstance(group, State):
            found.append(GroupBlocks(index, 0, (NO_HASH,)))
            continue
        first = 0 if group.window_tokens is None else max(0, num_tokens - group.window_tokens + 1) // cut.block_tokens
        found.append(GroupBlocks(index, first, (NO_HASH,) * (-(-num_tokens // cut.block_tokens) - first)))
    return tuple(found)


def blocks(groups: Sequence[Group], cut: Cut, lists: Sequence[GroupBlocks]) -> dict[tuple[int, int, int], bytes]:
    """By (rank, position, block) what each block holds."""
    return {
        (rank, position, n): groups[block_list.group].block(cut, rank, (block_list.first_block + n) * cut.block_tokens)
        for rank in range(cut.size)
        for position, block_list in enumerate(lists)
        for n in range(block_list.num_blocks)
    }
