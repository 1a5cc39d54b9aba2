"""Blocks as rows of bytes, and their copies to and from slots in host memory."""

import pytest

torch = pytest.importorskip("torch")

from prfaas.connector.worker.copy_host import (  # noqa: E402
    BlockPairs,
    HostCopier,
    LayerBlocks,
    pages_of,
    physical_axes,
    slots_tensor,
)
from prfaas.errors import LayoutError  # noqa: E402
from prfaas.kv.parts import LayerSlice  # noqa: E402

NUM_BLOCKS = 6


def layer(pages: object, offset: int) -> LayerBlocks:
    return LayerBlocks(0, 0, LayerSlice("l", offset, pages.shape[1], "uint8", "byte"), pages)  # type: ignore[attr-defined]


def test_a_row_is_what_a_block_occupies_without_its_padding() -> None:
    raw = torch.arange(NUM_BLOCKS * 100, dtype=torch.int64).to(torch.uint8)
    cache = raw.as_strided((NUM_BLOCKS, 1, 1, 60), (100, 60, 60, 1), 5)
    pages = pages_of("l", cache, NUM_BLOCKS)
    assert pages.shape == (NUM_BLOCKS, 60)
    assert torch.equal(pages[3], raw[5 + 300 : 5 + 360])
    pages[3] = 0
    assert not cache[3].any()  # The rows are a view.


def test_elements_of_several_bytes_and_permuted_axes_keep_their_order_in_memory() -> None:
    cache = torch.randn(NUM_BLOCKS, 4, 2, 8).permute(0, 2, 1, 3)  # [block, head, token, content], token-major in memory
    pages = pages_of("l", cache, NUM_BLOCKS)
    assert pages.shape == (NUM_BLOCKS, 4 * 2 * 8 * 4)
    assert torch.equal(pages[1].view(torch.float32), cache[1].permute(1, 0, 2).reshape(-1))
    assert physical_axes(cache, ("head", "token", "content")) == "token,head,content"


def test_kernel_blocks_are_put_together() -> None:
    cache = torch.arange(NUM_BLOCKS * 4 * 10, dtype=torch.int16).view(NUM_BLOCKS * 4, 10)
    pages = pages_of("l", cache, NUM_BLOCKS)
    assert torch.equal(pages[2].view(torch.int16), cache[8:12].reshape(-1))


def test_scattered_blocks_are_refused_by_name() -> None:
    head_major = torch.zeros(2, NUM_BLOCKS, 4, 8).permute(1, 0, 2, 3)  # A block lies in two places.
    with pytest.raises(LayoutError, match=r"layer l: the bytes of a block are scattered"):
        pages_of("l", head_major, NUM_BLOCKS)
    padded_pieces = torch.zeros(NUM_BLOCKS * 2, 20)[:, :10]
    with pytest.raises(LayoutError, match="scattered"):
        pages_of("l", padded_pieces, NUM_BLOCKS)
    with pytest.raises(LayoutError, match="do not divide"):
        pages_of("l", torch.zeros(NUM_BLOCKS + 1, 8), NUM_BLOCKS)


def test_copies_there_and_back_touch_nothing_else() -> None:
    arena = bytearray(64 + 5 * 256)
    slots = slots_tensor(memoryview(arena), header_bytes=64, slot_bytes=256, num_slots=5)
    pages = torch.randint(1, 255, (NUM_BLOCKS, 100), dtype=torch.uint8)
    copier, done = HostCopier([slots]), []
    copier.save([(layer(pages, 28), BlockPairs([1, 2, 5, 0], [2, 3, 4, 0]))], lambda: done.append("save"))
    assert bytes(arena[64 + 2 * 256 + 28 :][:100]) == bytes(pages[1].tolist())
    assert not any(arena[:64]) and not any(arena[64 + 256 : 64 + 512]) and not any(arena[64 + 512 : 64 + 540])
    empty = torch.zeros_like(pages)
    copier.load([(layer(empty, 28), BlockPairs([4, 3, 1], [2, 3, 0]))], lambda: done.append("load"))
    assert done == ["save", "load"]
    assert torch.equal(empty[4], pages[1]) and torch.equal(empty[3], pages[2]) and torch.equal(empty[1], pages[0])
    assert not empty[[0, 2, 5]].any()
