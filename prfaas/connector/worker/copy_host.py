"""Blocks of layers in an engine, and copies between them and the agent's slots in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from prfaas.errors import LayoutError
from prfaas.kv.parts import LayerSlice, piece_of


@dataclass(frozen=True)
class LayerBlocks:
    """KV of one layer in an engine. `pages[block_id]` is one block, or the rank's piece of it; shape [block, payload byte].

    `is_overwritten`: the next step of a request writes to the same block, as with recurrent states outside a cache.
    `arena` is the number of the client's arena with the slots: 0 is the rank's own.
    """

    group: int
    layer: int  # Number within the group.
    slice: LayerSlice
    pages: torch.Tensor
    is_overwritten: bool = False
    arena: int = 0

    def of_sibling(self, slice_: LayerSlice, arena: int) -> LayerBlocks:
        """Return the piece of a block that a sibling's arena has, whose slice is `slice_`."""
        distance = piece_of(slice_)[0] - piece_of(self.slice)[0]
        offset = self.pages.storage_offset() + distance * slice_.payload_bytes
        pages = self.pages.as_strided(self.pages.shape, self.pages.stride(), offset)
        return replace(self, slice=slice_, pages=pages, arena=arena)


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


@dataclass(frozen=True)
class BlockPairs:
    """Engine blocks and slots of one group: `slots[i]` belongs to `block_ids[i]` in every layer of the group."""

    block_ids: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def add(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self.block_ids.extend(block_ids)
        self.slots.extend(slots)


LayerCopy = tuple[LayerBlocks, BlockPairs]


class HostCopier:
    """Copier for blocks in host memory. Each copy is complete when its call returns."""

    stages_states = False

    def __init__(self, slots: Sequence[torch.Tensor]) -> None:
        """Copy to and from the slots of arenas, each of shape [slot, byte]."""
        self._slots = slots

    def save(self, copies: Sequence[LayerCopy], done: Callable[[], None]) -> None:
        """Copy blocks to slots, then call `done`."""
        for pages, memory in self._runs(copies):
            memory.copy_(pages)
        done()

    def load(self, copies: Sequence[LayerCopy], done: Callable[[], None]) -> None:
        """Copy slots to blocks, then call `done`."""
        for pages, memory in self._runs(copies):
            pages.copy_(memory)
        done()

    def _runs(self, copies: Sequence[LayerCopy]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield blocks and slots of each run that is consecutive on both sides."""
        for layer, pairs in copies:
            slots = self._slots[layer.arena]
            stride = slots.stride(0)
            for block, slot, length in _consecutive(pairs):
                # A block may take several slots, so that its bytes reach beyond the first one.
                start = slots.storage_offset() + slot * stride + layer.slice.offset_bytes
                memory = slots.as_strided((length, layer.slice.payload_bytes), (stride, 1), start)
                yield layer.pages[block : block + length], memory

    def close(self) -> None:
        pass


def _consecutive(pairs: BlockPairs) -> Iterator[tuple[int, int, int]]:
    """Yield first block, first slot and length of each run."""
    block_ids, slots = pairs.block_ids, pairs.slots
    start = 0
    for stop in range(1, len(slots) + 1):
        is_run = stop < len(slots) and slots[stop] == slots[stop - 1] + 1
        if is_run and block_ids[stop] == block_ids[stop - 1] + 1:
            continue
        yield block_ids[start], slots[start], stop - start
        start = stop
