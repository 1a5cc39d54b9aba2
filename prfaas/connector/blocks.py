"""Copies between an engine's blocks and the slots of the arena, on a CPU at once, on a GPU beside the model's stream."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from prfaas.agent.protocol import HELD

_HOST_REGISTER_PORTABLE = 1


class Copier(Protocol):
    """Moves rows between a layer's blocks and the slots; offsets are bytes inside a slot."""

    def gather(
        self, rows: torch.Tensor, block_ids: Sequence[int], slots: Sequence[int], *, offset: int, done: Callable[[], None]
    ) -> None:
        """Copy blocks into slots; `done` is called, perhaps from another thread, once the slots hold them."""

    def scatter(self, rows: torch.Tensor, block_ids: Sequence[int], slots: Sequence[int], *, offset: int) -> None:
        """Copy slots into blocks, ordered before what the engine's stream does next."""

    def after_gathers(self, done: Callable[[], None]) -> None:
        """Call `done` after the `done` of every gather before."""

    def fence(self) -> None:
        """Have the engine's stream overwrite no block that a gather still reads; the host does not wait."""

    def loaded(self) -> None:
        """Return when every scatter has read its slots."""

    def close(self) -> None: ...


def slots_as_rows(arena: memoryview, *, header_bytes: int, slot_bytes: int, num_slots: int) -> torch.Tensor:
    """The arena as bytes of shape [slot, byte], a view."""
    flat = torch.frombuffer(arena, dtype=torch.uint8, offset=header_bytes, count=num_slots * slot_bytes)
    return flat.view(num_slots, slot_bytes)


class HostCopier:
    """For engines whose blocks are in host memory: a copy is done when the call returns."""

    def __init__(self, slots: torch.Tensor) -> None:
        self._slots = slots

    def gather(
        self, rows: torch.Tensor, block_ids: Sequence[int], slots: Sequence[int], *, offset: int, done: Callable[[], None]
    ) -> None:
        end = offset + rows.shape[1]
        for block_id, slot in zip(block_ids, slots, strict=True):
            if slot != HELD:
                self._slots[slot, offset:end].copy_(rows[block_id])
        done()

    def scatter(self, rows: torch.Tensor, block_ids: Sequence[int], slots: Sequence[int], *, offset: int) -> None:
        end = offset + rows.shape[1]
        for block_id, slot in zip(block_ids, slots, strict=True):
            rows[block_id].copy_(self._slots[slot, offset:end])

    def after_gathers(self, done: Callable[[], None]) -> None:
        done()

    def fence(self) -> None:
        pass

    def loaded(self) -> None:
        pass

    def close(self) -> None:
        pass


class CudaCopier:
    """For engines on an NVIDIA GPU: one side stream per direction, pinned slots, events instead of waits.

    A gather first collects the blocks of a layer into one device buffer (one kernel), then copies that to the slots, so
    that the engine's blocks are free to be overwritten as soon as the kernel has run.
    """

    def __init__(self, slots: torch.Tensor, device: torch.device) -> None:
        self._slots = slots
        self._device = device
        self._register()
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._read: torch.cuda.Event | None = None  # when the last gather kernel has read its blocks
        self._finishing: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._finish_forever, name="prfaas-gather", daemon=True)
        self._thread.start()

    def _register(self) -> None:
        """Pin the arena, so that copies run beside the model."""
        runtime = torch.cuda.cudart()
        size = self._slots.numel()
        status = runtime.cudaHostRegister(self._slots.data_ptr(), size, _HOST_REGISTER_PORTABLE)
        if int(status) != 0:
            raise RuntimeError(f"cudaHostRegister of {size} bytes failed with {status}; is the memlock limit high enough?")

    def _finish_forever(self) -> None:
        while (item := self._finishing.get()) is not None:
            event, done = item
            event.synchronize()
            done()

    def gather(
        self, rows: torch.Tensor, block_ids: Sequence[int], slots: Sequence[int], *, offset: int, done: Callable[[], None]
    ) -> None:
        wanted = [(block_id, slot) for block_id, slot in zip(block_ids, slots, strict=True) if slot != HELD]
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            if wanted:
                index = torch.tensor([block_id for block_id, _ in wanted], pin_memory=True)
                packed = rows.index_select(0, index.to(self._device, non_blocking=True))
                self._read = torch.cuda.Event()
                self._read.record()
                for place, (_, slot) in enumerate(wanted):
                    self._slots[slot, offset : offset + rows.shape[1]].copy_(packed[place], non_blocking=True)
            finished = torch.cuda.Event()
            finished.record()
        self._finishing.put((finished, done))

    def scatter(self, rows: torch.Tensor, block_ids: Sequence[int], slots: Sequence[int], *, offset: int) -> None:
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._in):
            for block_id, slot in zip(block_ids, slots, strict=True):
                rows[block_id].copy_(self._slots[slot, offset : offset + rows.shape[1]], non_blocking=True)

    def after_gathers(self, done: Callable[[], None]) -> None:
        event = torch.cuda.Event()
        event.record(self._out)
        self._finishing.put((event, done))

    def fence(self) -> None:
        if self._read is not None:
            torch.cuda.current_stream(self._device).wait_event(self._read)
            self._read = None

    def loaded(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._in)
        self._in.synchronize()

    def close(self) -> None:
        self._finishing.put(None)
        self._thread.join()
        self._in.synchronize()
        torch.cuda.cudart().cudaHostUnregister(ctypes.c_void_p(self._slots.data_ptr()).value)


def make_copier(slots: torch.Tensor, device: torch.device) -> Copier:
    """The copier for blocks on `device`."""
    return CudaCopier(slots, device) if device.type == "cuda" else HostCopier(slots)
