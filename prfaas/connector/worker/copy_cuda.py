"""Copies between an engine's blocks in GPU memory and the agent's slots, and the pinned extents of the arena.

Extents of whole pages and whole slots are pinned in order as slots come into use. A pool prefers used slots, then the
lowest one. So about as much memory is pinned as was ever in use at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import lcm
from typing import Any

import torch

from prfaas import logs
from prfaas.agent.engine.client import AgentClient
from prfaas.cachepool.arena import PAGE_BYTES
from prfaas.connector.worker.copy_host import Copier, HostCopier, LayerBlocks, slots_tensor

# Pinning takes 0.1 s per GB (vLLM pull request 51081, H200), and the driver may delay other threads meanwhile.
EXTENT_BYTES = 64 << 20
AHEAD_BYTES = 1 << 30  # Pinned before they are needed.


class Extents:
    """Extents of one arena's slots. A thread pins them; the caller uses them."""

    def __init__(
        self,
        *,
        num_slots: int,
        slot_bytes: int,
        pin: Callable[[int, int], bool],
        extent_bytes: int = EXTENT_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        """Pin nothing yet. `pin` takes an offset from the first slot and a number of bytes; it returns whether it worked."""
        self._pin = pin
        self._total_bytes = num_slots * slot_bytes
        aligned_bytes = lcm(PAGE_BYTES, slot_bytes)
        self._extent_bytes = max(1, extent_bytes // aligned_bytes) * aligned_bytes
        self._slots_each = self._extent_bytes // slot_bytes
        self._num_ahead = -(-ahead_bytes // self._extent_bytes)
        self._ranges = iter(range(0, self._total_bytes, self._extent_bytes))
        self._pins: list[Future[bool]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prfaas-pins")

    def pin_first(self) -> bool:
        """Pin the first extent only: an engine that records CUDA graphs next must not overlap with pinning."""
        self._start(1)
        return self._pins[0].result()

    def pin(self, slots: Sequence[int]) -> bool:
        """Return whether a device can reach all slots. Wait for their extents, and start to pin the following ones."""
        last = max(slots, default=0) // self._slots_each
        self._start(last + 1 + self._num_ahead)
        return self._pins[last].result()

    def _start(self, num_extents: int) -> None:
        while len(self._pins) < num_extents and (offset := next(self._ranges, None)) is not None:
            before = self._pins[-1] if self._pins else None
            self._pins.append(self._thread.submit(self._pin_after, before, offset))

    def _pin_after(self, before: Future[bool] | None, offset: int) -> bool:
        """Pin an extent unless the one before failed: the system's limit is reached then."""
        num_bytes = min(self._extent_bytes, self._total_bytes - offset)
        return (before is None or before.result()) and self._pin(offset, num_bytes)

    def close(self) -> list[int]:
        """End the thread and return the offsets of pinned extents."""
        self._thread.shutdown(cancel_futures=True)
        num_pinned = sum(not pin.cancelled() and pin.result() for pin in self._pins)
        return [number * self._extent_bytes for number in range(num_pinned)]


_MAPPED_AND_PORTABLE = 0x02 | 0x01  # cudaHostRegisterMapped | cudaHostRegisterPortable
_WORD_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)
_Callback = tuple[torch.cuda.Event, Callable[[], None]]
_IndexKey = tuple[int, tuple[int, ...], tuple[int, ...]]  # Stream, block ids, slots.
_log = logs.get("connector.worker")


def copier_for(client: AgentClient, *, device: torch.device) -> Copier:
    """Return a copier between blocks on `device` and the arena that the client has mapped."""
    agent = client.attached
    slots = slots_tensor(
        client.arena, header_bytes=agent.header_bytes, slot_bytes=agent.slot_bytes, num_slots=agent.num_slots
    )
    return CudaCopier(slots, device) if device.type == "cuda" else HostCopier(slots)


class _CudaArray:
    """Pinned host memory behind the CUDA array interface, through which torch accepts foreign device memory."""

    def __init__(self, pointer: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {"data": (pointer, False), "shape": shape, "typestr": "|u1", "version": 3}


class CudaCopier:
    """Copier for blocks in GPU memory. Saves and loads run on two streams, after the model's work so far."""

    def __init__(self, slots: torch.Tensor, device: torch.device, *, extent_bytes: int = EXTENT_BYTES) -> None:
        """Map `slots` for `device` and pin the first extent."""
        self._host = slots
        self._device = device
        num_slots, slot_bytes = slots.shape
        self._extents = Extents(num_slots=num_slots, slot_bytes=slot_bytes, pin=self._pin, extent_bytes=extent_bytes)
        self.is_unpinned = not self._extents.pin_first()
        with torch.cuda.device(device):
            mapped: Any = _CudaArray(slots.data_ptr(), (num_slots, slot_bytes))
            # Pinned memory has the same address on host and device.
            self._slots = slots if self.is_unpinned else torch.as_tensor(mapped, device=device)
            self._save_stream = torch.cuda.Stream(device)
            self._load_stream = torch.cuda.Stream(device)
        self._saved = _EventThread("prfaas-saves")
        self._loaded = _EventThread("prfaas-loads")
        self._last_save: torch.cuda.Event | None = None
        self._indices: tuple[_IndexKey, torch.Tensor, torch.Tensor] | None = None

    def _pin(self, offset: int, num_bytes: int) -> bool:
        """Pin memory. Runs on the thread of the extents, since CUDA keeps an error for the thread's next call."""
        with torch.cuda.device(self._device):
            address = self._host.data_ptr() + offset
            result = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _MAPPED_AND_PORTABLE))
        if result:
            _log.error("arena.pin_failed", first_bytes=offset, num_bytes=num_bytes, cuda_error=result)
        return not result

    def save(self, layer: LayerBlocks, block_ids: Sequence[int], slots: Sequence[int]) -> int:
        start, size = layer.slice.offset_bytes, layer.slice.payload_bytes
        self._save_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._save_stream):
            indices, memory = self._prepare(block_ids, slots)
            pages, target = _as_words(layer.pages, memory[:, start : start + size])
            device = target.device
            target.index_copy_(0, indices[1].to(device), pages.index_select(0, indices[0]).to(device))
            self._last_save = _record(self._save_stream)
        return len(slots) * size

    def load(self, layer: LayerBlocks, block_ids: Sequence[int], slots: Sequence[int]) -> int:
        start, size = layer.slice.offset_bytes, layer.slice.payload_bytes
        self._load_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._load_stream):
            indices, memory = self._prepare(block_ids, slots)
            pages, source = _as_words(layer.pages, memory[:, start : start + size])
            values = source.index_select(0, indices[1].to(source.device))
            pages.index_copy_(0, indices[0], values.to(self._device))
        return len(slots) * size

    def _prepare(self, block_ids: Sequence[int], slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both lists as a tensor [2, n] on the current stream, and the slots; computed once for all layers of a span.

        The slots are those of the host if the device cannot reach them.
        """
        key = torch.cuda.current_stream(self._device).cuda_stream, tuple(block_ids), tuple(slots)
        if self._indices is None or self._indices[0] != key:
            host = torch.tensor(key[1:], dtype=torch.int64).pin_memory()
            memory = self._slots if self._extents.pin(slots) else self._host
            self._indices = key, host.to(self._device, non_blocking=True), memory
        return self._indices[1:]

    def then_saved(self, function: Callable[[], None]) -> None:
        """Call `function` on a thread after the saves and the model's work so far."""
        self._save_stream.wait_stream(torch.cuda.current_stream(self._device))
        self._saved.after(_record(self._save_stream), function)

    def then_loaded(self, function: Callable[[], None]) -> None:
        """Call `function` on a thread after the loads so far."""
        self._loaded.after(_record(self._load_stream), function)

    def fence(self) -> None:
        if self._last_save is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last_save)
            self._last_save = None

    def close(self) -> None:
        """Wait for running copies, end the threads, and unpin the arena."""
        self._saved.close()
        self._loaded.close()
        torch.cuda.synchronize(self._device)
        for offset in self._extents.close():
            torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr() + offset)


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event that a thread can wait for without spinning."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


class _EventThread:
    """Thread that calls functions in order, each after its event."""

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
    """Return views of the widest type that addresses and sizes allow: a kernel moves one word per thread."""
    alignment = (pages.data_ptr(), slots.data_ptr(), pages.stride(0), slots.stride(0), pages.shape[1])
    word = next(word for word in _WORD_TYPES if all(number % word.itemsize == 0 for number in alignment))
    return pages.view(word), slots.view(word)
