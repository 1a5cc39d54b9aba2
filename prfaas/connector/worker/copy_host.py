"""Copying between an engine's blocks in host memory and the agent's slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from prfaas.errors import LayoutError
from prfaas.kv.parts import LayerSlice


@dataclass(frozen=True)
class LayerBlocks:
    """One layer's KV in an engine: `pages[block_id]` are the bytes of one block, shape [block, payload byte]."""

    group: int
    layer: int  # within the group
    slice: LayerSlice
    pages: torch.Tensor


def pages_of(name: str, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """The bytes of a layer's cache with one row per block; a view, valid as long as `cache`.

    `cache` is [block, ...], or [block · k, ...] where the kernel splits a block into k pieces. A row is what a block's
    elements take up; padding between blocks lies between the rows.

    Raises:
        LayoutError: the elements of one block do not lie together.
    """
    pieces, remainder = divmod(cache.shape[0], num_blocks)
    if remainder or not pieces:
        raise LayoutError(f"layer {name}: {cache.shape[0]} kernel blocks do not divide into {num_blocks} blocks")
    piece_elements, block_stride = cache[0].numel(), cache.stride()[0]
    if not _is_dense(cache[0]) or (pieces > 1 and block_stride != piece_elements):
        raise LayoutError(
            f"layer {name}: the bytes of a block are scattered (shape {tuple(cache.shape)}, strides {cache.stride()}); "
            "choose a KV cache layout that is compact per block"
        )
    width = cache.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=cache.device)
    flat.set_(cache.untyped_storage())
    size = (num_blocks, pieces * piece_elements * width)
    return flat.as_strided(size, (pieces * block_stride * width, 1), cache.storage_offset() * width)


def _is_dense(block: torch.Tensor) -> bool:
    """Whether the elements lie together, in whatever order of axes."""
    expected = 1
    for stride, size in sorted(zip(block.stride(), block.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def physical_axes(cache: torch.Tensor, names: Sequence[str]) -> str:
    """The axes after the first one as they lie in memory, outermost first."""
    order = sorted(range(1, cache.dim()), key=lambda axis: (-cache.stride()[axis], axis))
    return ",".join(names[axis - 1] for axis in order)


def slots_tensor(arena: memoryview, *, header_bytes: int, slot_bytes: int, num_slots: int) -> torch.Tensor:
    """The arena's slots as bytes, shape [slot, byte]; keeps the mapping alive."""
    flat = torch.frombuffer(arena, dtype=torch.uint8, count=num_slots * slot_bytes, offset=header_bytes)
    return flat.view(num_slots, slot_bytes)


class Copier(Protocol):
    """Moves blocks between engine and slots. `then` calls run in order, each when all copies before it are done.

    `is_unpinned`: it needs pinned slots, and none could be pinned, so that the engine waits for all copies.
    """

    is_unpinned: bool

    def save(self, layer: LayerBlocks, block_ids: Sequence[int], slots: Sequence[int]) -> int:
        """Copy blocks out; returns the bytes."""

    def load(self, layer: LayerBlocks, block_ids: Sequence[int], slots: Sequence[int]) -> int:
        """Copy blocks in; returns the bytes."""

    def then_saved(self, function: Callable[[], None]) -> None:
        """Call `function` once the saves so far are done."""

    def then_loaded(self, function: Callable[[], None]) -> None:
        """Call `function` once the loads so far are done."""

    def fence(self) -> None:
        """Let no later work of the engine overwrite a block that a save still reads."""

    def close(self) -> None:
        """End what runs beside the engine."""


class HostCopier:
    """Blocks in host memory: each copy is done when its call returns."""

    is_unpinned = False

    def __init__(self, slots: torch.Tensor) -> None:
        """`slots` as `slots_tensor` gives them."""
        self._slots = slots

    def save(self, layer: LayerBlocks, block_ids: Sequence[int], slots: Sequence[int]) -> int:
        start, size = layer.slice.offset_bytes, layer.slice.payload_bytes
        copied = 0
        for block, slot, length in _runs(block_ids, slots):
            self._slots[slot : slot + length, start : start + size].copy_(layer.pages[block : block + length])
            copied += length * size
        return copied

    def load(self, layer: LayerBlocks, block_ids: Sequence[int], slots: Sequence[int]) -> int:
        start, size = layer.slice.offset_bytes, layer.slice.payload_bytes
        copied = 0
        for block, slot, length in _runs(block_ids, slots):
            layer.pages[block : block + length].copy_(self._slots[slot : slot + length, start : start + size])
            copied += length * size
        return copied

    def then_saved(self, function: Callable[[], None]) -> None:
        function()

    def then_loaded(self, function: Callable[[], None]) -> None:
        function()

    def fence(self) -> None:
        pass

    def close(self) -> None:
        pass


def _runs(block_ids: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first block, first slot, length) of the stretches that go up by one on both sides."""
    start = 0
    for end in range(1, len(slots) + 1):
        if end < len(slots) and slots[end] == slots[end - 1] + 1 and block_ids[end] == block_ids[end - 1] + 1:
            continue
        yield block_ids[start], slots[start], end - start
        start = end
