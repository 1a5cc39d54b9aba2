"""Blocks of layers in an engine, and copies between them and the agent's slots in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from prfaas.errors import LayoutError
from prfaas.kv.parts import LayerSlice


@dataclass(frozen=True)
class LayerBlocks:
    """KV of one layer in an engine. `pages[block_id]` is one block; shape [block, payload byte]."""

    group: int
    layer: int  # Number within the group.
    slice: LayerSlice
    pages: torch.Tensor


def pages_of(name: str, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return the bytes of a layer's cache with one row per block: a view that lives as long as `cache`.

    The shape of `cache` is [block, ...], or [block · k, ...] if the kernel splits a block into k pieces. Padding between
    blocks lies between the rows.

    Raises:
        LayoutError: The elements of a block are scattered.
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
    """Return whether the elements are contiguous in any order of axes."""
    expected = 1
    for stride, size in sorted(zip(block.stride(), block.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def physical_axes(cache: torch.Tensor, names: Sequence[str]) -> str:
    """Return the axes after the first one in memory order, outermost first."""
    order = sorted(range(1, cache.dim()), key=lambda axis: (-cache.stride()[axis], axis))
    return ",".join(names[axis - 1] for axis in order)


def slots_tensor(arena: memoryview, *, header_bytes: int, slot_bytes: int, num_slots: int) -> torch.Tensor:
    """Return the arena's slots as bytes, shape [slot, byte]. The tensor keeps the mapping alive."""
    flat = torch.frombuffer(arena, dtype=torch.uint8, count=num_slots * slot_bytes, offset=header_bytes)
    return flat.view(num_slots, slot_bytes)


class Copier(Protocol):
    """Copier of blocks between engine and slots.

    `is_unpinned` means that the copier needs pinned slots and none could be pinned: the engine waits for all copies.
    """

    is_unpinned: bool

    def save(self, layer: LayerBlocks, block_ids: Sequence[int], slots: Sequence[int]) -> int:
        """Copy blocks to slots and return the number of bytes."""

    def load(self, layer: LayerBlocks, block_ids: Sequence[int], slots: Sequence[int]) -> int:
        """Copy slots to blocks and return the number of bytes."""

    def then_saved(self, function: Callable[[], None]) -> None:
        """Call `function` after all saves so far, in the order of the calls."""

    def then_loaded(self, function: Callable[[], None]) -> None:
        """Call `function` after all loads so far, in the order of the calls."""

    def fence(self) -> None:
        """Keep later work of the engine from overwriting blocks that a save still reads."""

    def close(self) -> None:
        """End all copies and threads."""


class HostCopier:
    """Copier for blocks in host memory. Each copy is complete when its call returns."""

    is_unpinned = False

    def __init__(self, slots: torch.Tensor) -> None:
        self._slots = slots

    def save(self, layer: LayerBlocks, block_ids: Sequence[int], slots: Sequence[int]) -> int:
        for pages, memory in self._runs(layer, block_ids, slots):
            memory.copy_(pages)
        return len(slots) * layer.slice.payload_bytes

    def load(self, layer: LayerBlocks, block_ids: Sequence[int], slots: Sequence[int]) -> int:
        for pages, memory in self._runs(layer, block_ids, slots):
            pages.copy_(memory)
        return len(slots) * layer.slice.payload_bytes

    def _runs(
        self, layer: LayerBlocks, block_ids: Sequence[int], slots: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield blocks and slots of each run that is consecutive on both sides."""
        begin, end = layer.slice.offset_bytes, layer.slice.offset_bytes + layer.slice.payload_bytes
        start = 0
        for stop in range(1, len(slots) + 1):
            is_run = stop < len(slots) and slots[stop] == slots[stop - 1] + 1
            if is_run and block_ids[stop] == block_ids[stop - 1] + 1:
                continue
            block, slot, length = block_ids[start], slots[start], stop - start
            yield layer.pages[block : block + length], self._slots[slot : slot + length, begin:end]
            start = stop

    def then_saved(self, function: Callable[[], None]) -> None:
        function()

    def then_loaded(self, function: Callable[[], None]) -> None:
        function()

    def fence(self) -> None:
        pass

    def close(self) -> None:
        pass
