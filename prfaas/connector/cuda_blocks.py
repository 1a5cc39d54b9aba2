"""Copying between an engine's blocks on an NVIDIA GPU and the agent's slots, beside the model's stream.

The arena is pinned (cudaHostRegister), which also maps it into the GPU's address space: a gather writes slots directly
and a scatter reads them, two kernels a layer however many blocks there are. The host never waits: a small thread waits
for the events that say when copies are done. The model's stream waits (`fence`) before it may overwrite what is read.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from prfaas.agent.client import AgentClient
from prfaas.connector.blocks import Copier, HostCopier, LayerBlocks, slots_tensor
from prfaas.errors import LayoutError

_MAPPED_AND_PORTABLE = 0x02 | 0x01  # cudaHostRegisterMapped | cudaHostRegisterPortable
_WORD_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)
_Callback = tuple[torch.cuda.Event, Callable[[], None]]
_IndexKey = tuple[int, tuple[int, ...], tuple[int, ...]]  # stream, block ids, slots


def copier_for(client: AgentClient, *, device: torch.device) -> Copier:
    """A copier between blocks on `device` and the arena that the client has mapped.

    Raises:
        LayoutError: the arena cannot be pinned.
    """
    its = client.attached
    slots = slots_tensor(
        client.arena, header_bytes=its.header_bytes, slot_bytes=its.slot_bytes, num_slots=its.num_slots
    )
    return CudaCopier(slots, device) if device.type == "cuda" else HostCopier(slots)


class _Mapped:
    """Pinned host memory as torch takes foreign device memory."""

    def __init__(self, pointer: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {"data": (pointer, False), "shape": shape, "typestr": "|u1", "version": 3}


class CudaCopier:
    """Blocks in GPU memory. Saves and loads run on streams of their own, ordered after the model's work so far."""

    def __init__(self, slots: torch.Tensor, device: torch.device) -> None:
        """Pin `slots` (as `slots_tensor` gives them) and map them for `device`; touches every page once.

        Raises:
            LayoutError: the memory cannot be pinned.
        """
        self._host = slots
        self._device = device
        with torch.cuda.device(device):
            result = torch.cuda.cudart().cudaHostRegister(slots.data_ptr(), slots.numel(), _MAPPED_AND_PORTABLE)
            if int(result) != 0:
                raise LayoutError(f"the arena of {slots.numel()} bytes cannot be pinned (CUDA error {int(result)})")
            mapped: Any = _Mapped(slots.data_ptr(), (slots.shape[0], slots.shape[1]))
            self._slots = torch.as_tensor(mapped, device=device)
            self._save_stream = torch.cuda.Stream(device)
            self._load_stream = torch.cuda.Stream(device)
        self._saved = _Waiter("prfaas-saves")
        self._loaded = _Waiter("prfaas-loads")
        self._last_save: torch.cuda.Event | None = None
        self._indices: tuple[_IndexKey, torch.Tensor] | None = None

    def save(self, layer: LayerBlocks, block_ids: Sequence[int], slots: Sequence[int]) -> int:
        start, size = layer.slice.offset_bytes, layer.slice.payload_bytes
        self._save_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._save_stream):
            indices = self._on_device(block_ids, slots)
            pages, target = _as_words(layer.pages, self._slots[:, start : start + size])
            target.index_copy_(0, indices[1], pages.index_select(0, indices[0]))
            self._last_save = _record(self._save_stream)
        return len(slots) * size

    def load(self, layer: LayerBlocks, block_ids: Sequence[int], slots: Sequence[int]) -> int:
        start, size = layer.slice.offset_bytes, layer.slice.payload_bytes
        self._load_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._load_stream):
            indices = self._on_device(block_ids, slots)
            pages, source = _as_words(layer.pages, self._slots[:, start : start + size])
            pages.index_copy_(0, indices[0], source.index_select(0, indices[1]))
        return len(slots) * size

    def _on_device(self, block_ids: Sequence[int], slots: Sequence[int]) -> torch.Tensor:
        """Both lists as one tensor [2, n] on the current stream, made once for all layers of a span."""
        key = torch.cuda.current_stream(self._device).cuda_stream, tuple(block_ids), tuple(slots)
        if self._indices is None or self._indices[0] != key:
            host = torch.tensor(key[1:], dtype=torch.int64).pin_memory()
            self._indices = key, host.to(self._device, non_blocking=True)
        return self._indices[1]

    def then_saved(self, function: Callable[[], None]) -> None:
        """Call `function` from a thread once the saves so far, and the model's work so far, are done."""
        self._save_stream.wait_stream(torch.cuda.current_stream(self._device))
        self._saved.after(_record(self._save_stream), function)

    def then_loaded(self, function: Callable[[], None]) -> None:
        """Call `function` from a thread once the loads so far are done."""
        self._loaded.after(_record(self._load_stream), function)

    def fence(self) -> None:
        if self._last_save is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last_save)
            self._last_save = None

    def close(self) -> None:
        """Wait for the copies under way, end the threads, unpin the arena."""
        self._saved.close()
        self._loaded.close()
        torch.cuda.synchronize(self._device)
        torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr())


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event that a thread can wait for without spinning."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


class _Waiter:
    """A thread that calls functions in order, each after its event."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Callback | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def after(self, event: torch.cuda.Event, function: Callable[[], None]) -> None:
        self._queue.put((event, function))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            event, function = item
            event.synchronize()
            function()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


def _as_words(pages: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sides through the widest type that their addresses and sizes allow: a kernel moves a word per thread."""
    alignment = (pages.data_ptr(), slots.data_ptr(), pages.stride(0), slots.stride(0), pages.shape[1])
    word = next(its for its in _WORD_TYPES if all(number % its.itemsize == 0 for number in alignment))
    return pages.view(word), slots.view(word)
