"""Repacked blocks of random models equal the blocks that the target engine would have written."""

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import LayoutError
from prfaas.kv.repack import Box, Side, moves, obstacle, whole_blocks
from tests.support.repack_models import Attention, Cut, Group, State, block_lists, blocks, layouts

SIZES = (1, 2, 4, 8)
CPU = "vllm 0.32; cpu; CPU_ATTN"
MODELS: dict[str, tuple[Group, ...]] = {
    "8 heads": (Attention(8),),
    "2 heads": (Attention(2),),  # With more ranks than heads, several ranks hold the same head.
    "latent": (Attention(1),),
    "windows": (Attention(4), Attention(4, kind="sliding_window", window_tokens=40)),
    "mamba2, 8 groups": (State("mamba2"), Attention(2)),
    "mamba2, 1 group": (State("mamba2", num_groups=1), Attention(8)),
    "gated delta net": (State("gdn_attn"), Attention(2)),
    "short convolution": (State("short_conv"), Attention(2)),
    "lightning": (State("linear"), Attention(1)),
    "divided latent": (State("gdn_attn"), Attention(1, divided=True)),
    "divided heads": (State("gdn_attn"), Attention(2, divided=True)),
}


def _repacked(groups: Sequence[Group], there: Cut, here: Cut, num_tokens: int) -> dict[tuple[int, int, int], bytearray]:
    """The target's blocks, of what the moves bring alone."""
    source = Side(layouts(groups, there), block_lists(groups, there, num_tokens))
    target = Side(layouts(groups, here), block_lists(groups, here, num_tokens))
    held = blocks(groups, there, source.groups)
    found = {place: bytearray(len(content)) for place, content in blocks(groups, here, target.groups).items()}
    for move in moves(source, target):
        for source_block, target_block in move.pairs:
            for box in move.boxes:
                for start, end in _items(box):
                    into = found[move.target_rank, move.position, target_block]
                    content = held[move.source_rank, move.position, source_block][start : start + box.item_bytes]
                    assert len(content) == box.item_bytes
                    into[end : end + box.item_bytes] = content
    return found


def _items(box: Box) -> Iterator[tuple[int, int]]:
    """Yield the source and target offset of each item."""
    for at in product(*map(range, box.counts)):
        source = sum(n * stride for n, stride in zip(at, box.source_strides, strict=True))
        target = sum(n * stride for n, stride in zip(at, box.target_strides, strict=True))
        yield box.source_offset + source, box.target_offset + target


def _assert_equal(groups: Sequence[Group], there: Cut, here: Cut, num_tokens: int) -> None:
    """Every block is right in all its tokens below `num_tokens` that the source has."""
    source = Side(layouts(groups, there), block_lists(groups, there, num_tokens))
    target = Side(layouts(groups, here), block_lists(groups, here, num_tokens))
    found, wanted = _repacked(groups, there, here, num_tokens), blocks(groups, here, target.groups)
    for (rank, position, block), content in wanted.items():
        whole = whole_blocks(source, target, position, num_tokens=num_tokens)[block]
        length = here.block_tokens
        is_full = (target.groups[position].first_block + block + 1) * length <= num_tokens
        if whole and is_full:
            assert found[rank, position, block] == content, (there, here, rank, position, block)
        else:
            _assert_tokens(
                groups[target.groups[position].group], here, content, found[rank, position, block], source, position
            )


def _assert_tokens(group: Group, here: Cut, wanted: bytes, found: bytearray, source: Side, position: int) -> None:
    """A partial block holds right bytes, or none where the source has none."""
    assert isinstance(group, Attention) or found == wanted
    width = 8
    for start in range(0, len(wanted), width):
        item = found[start : start + width]
        assert item in (wanted[start : start + width], bytes(width))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("there", "here"), list(product(SIZES, SIZES)))
def test_blocks_are_repacked_between_any_tensor_parallel_sizes(model: str, there: int, here: int) -> None:
    _assert_equal(MODELS[model], Cut(there), Cut(here), 100)


@settings(max_examples=settings().max_examples * 2 // 5)
@given(
    model=st.sampled_from(sorted(MODELS)),
    sizes=st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)),
    lengths=st.tuples(*[st.sampled_from((16, 32, 48, 64, 144))] * 2),
    orders=st.tuples(*[st.sampled_from(("head,token,content", "token,head,content"))] * 2),
    num_tokens=st.integers(1, 200),
    channels_last=st.booleans(),
    drafts=st.tuples(*[st.sampled_from((0, 3))] * 2),
)
def test_any_two_engines_of_a_model_exchange_blocks(
    model: str,
    sizes: tuple[int, int],
    lengths: tuple[int, int],
    orders: tuple[str, str],
    num_tokens: int,
    channels_last: bool,
    drafts: tuple[int, int],
) -> None:
    there, here = (
        Cut(size, length, order, channels_last=channels_last, num_drafts=num_drafts)
        for size, length, order, num_drafts in zip(sizes, lengths, orders, drafts, strict=True)
    )
    assert obstacle(layouts(MODELS[model], there)[0], layouts(MODELS[model], here)[0]) is None
    _assert_equal(MODELS[model], there, here, num_tokens)


@pytest.mark.parametrize("model", MODELS)
def test_packed_blocks_are_repacked_by_whole_heads(model: str) -> None:
    for there, here in product(SIZES, SIZES):
        _assert_equal(MODELS[model], Cut(there, packing=CPU), Cut(here, packing=CPU), 96)


def _obstacle(groups: Sequence[Group], there: Cut, here: Cut, *, others: Sequence[Group] | None = None) -> str:
    found = obstacle(layouts(others or groups, there)[0], layouts(groups, here)[0])
    assert found is not None
    return found


def test_an_obstacle_is_named() -> None:
    heads = MODELS["8 heads"]
    packed = _obstacle(heads, Cut(2, 16, packing=CPU), Cut(1, 32, packing=CPU))
    assert packed == (
        "group 0: blocks of 32 tokens here, 16 there, and this processor's kernels pack a block as a whole"
    )
    scattered = _obstacle(heads, *[Cut(size, order="token,head,content", packing=CPU) for size in (1, 2)])
    assert scattered == "layer attention.0: the kernels pack a block whose heads do not each lie together"
    assert "packing: gpu" in _obstacle(heads, Cut(2, packing=CPU), Cut(1, packing="gpu"))
    assert "conv=DS" in _obstacle(MODELS["short convolution"], Cut(2, channels_last=False), Cut(1))
    assert _obstacle(heads, Cut(2), Cut(1), others=(*heads, Attention(8))) == "number of KV groups: 1 here, 2 there"
    assert _obstacle(heads, Cut(2), Cut(1), others=(Attention(8, num_layers=3),)) == ("group 0: the layers differ")
    windows = [(Attention(8, kind="sliding_window", window_tokens=window),) for window in (40, 64)]
    assert _obstacle(windows[0], Cut(2), Cut(1), others=windows[1]) == "group 0: window_tokens: 40 here, 64 there"
    assert "mamba1 3x64" in _obstacle((State("mamba1"),), Cut(2), Cut(1))


def test_missing_heads_are_reported() -> None:
    heads = MODELS["8 heads"]
    half = Side(layouts(heads, Cut(2))[:1], block_lists(heads, Cut(2), 100))
    with pytest.raises(LayoutError, match="no rank holds head 4"):
        list(moves(half, Side(layouts(heads, Cut(1)), block_lists(heads, Cut(1), 100))))


def test_a_block_that_begins_before_the_window_is_not_whole() -> None:
    groups = (Attention(4, kind="sliding_window", window_tokens=40),)
    source, target = (Side(layouts(groups, cut), block_lists(groups, cut, 200)) for cut in (Cut(2, 16), Cut(1, 48)))
    assert [side.groups[0].first_block for side in (source, target)] == [10, 3]  # Tokens 160 and 144.
    assert whole_blocks(source, target, 0, num_tokens=200) == [False, True]
