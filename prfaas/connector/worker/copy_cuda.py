"""What of an arena a device may reach: extents of whole pages and whole slots, pinned in order as slots come into use.

A pool gives out what was used before first and then the lowest slot, so that about as much is pinned as was ever in use
at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import lcm
from typing import Any

import torch

from prfaas import logs
from prfaas.agent.engine.client import AgentClient
from prfaas.cachepool.arena import PAGE_BYTES
from prfaas.connector.worker.copy_host import Copier, HostCopier, LayerBlocks, slots_tensor

# To pin takes 0.1 s a GB (vLLM's pull request 51081, H200), and the driver may hold up other threads' work meanwhile.
EXTENT_BYTES = 64 << 20
AHEAD_BYTES = 1 << 30  # are pinned before they are needed


class Extents:
    """The extents of one arena's slots. One thread pins; another one uses what is pinned."""

    def __init__(
        self,
        *,
        num_slots: int,
        slot_bytes: int,
        pin: Callable[[int, int], bool],
        extent_bytes: int = EXTENT_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        """`pin` of an offset from the first slot and a number of bytes says whether they could be pinned."""
        self._pin = pin
        self._total_bytes = num_slots * slot_bytes
        aligned_bytes = lcm(PAGE_BYTES, slot_bytes)
        self._extent_bytes = max(1, extent_bytes // aligned_bytes) * aligned_bytes
        self._slots_each = self._extent_bytes // slot_bytes
        self._num_ahead = -(-ahead_bytes // self._extent_bytes)
        self._ranges = self._all()
        self._begun: list[Future[bool]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prfaas-pins")

    def _all(self) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of each."""
        for offset in range(0, self._total_bytes, self._extent_bytes):
            yield offset, min(self._extent_bytes, self._total_bytes - offset)

    def reach_first(self) -> bool:
        """Pin the first extent and no more: an engine that records CUDA graphs afterwards must not meet a pin under way."""
        self._begin(1)
        return self._begun[0].result()

    def reach(self, slots: Sequence[int]) -> bool:
        """Whether a device may reach all of these; waits for what is still being pinned, and has what follows pinned."""
        last = max(slots, default=0) // self._slots_each
        self._begin(last + 1 + self._num_ahead)
        return self._begun[last].result()

    def _begin(self, num_extents: int) -> None:
        while len(self._begun) < num_extents and (its := next(self._ranges, None)) is not None:
            before = self._begun[-1] if self._begun else None
            self._begun.append(self._thread.submit(self._pin_after, before, *its))

    def _pin_after(self, before: Future[bool] | None, offset: int, num_bytes: int) -> bool:
        """Behind one that could not be pinned none is: the system's limit is reached."""
        return (before is None or before.result()) and self._pin(offset, num_bytes)

    def close(self) -> list[int]:
        """End the thread; the offsets of what it has pinned."""
        self._thread.shutdown(cancel_futures=True)
        pinned = (its for its in self._begun if not its.cancelled() and its.result())
        return [place * self._extent_bytes for place, _ in enumerate(pinned)]


_MAPPED_AND_PORTABLE = 0x02 | 0x01  # cudaHostRegisterMapped | cudaHostRegisterPortable
_WORD_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)
_Callback = tuple[torch.cuda.Event, Callable[[], None]]
_IndexKey = tuple[int, tuple[int, ...], tuple[int, ...]]  # stream, block ids, slots
_log = logs.get("connector.worker")


def copier_for(client: AgentClient, *, device: torch.device) -> Copier:
    """A copier between blocks on `device` and the arena that the client has mapped."""
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

    def __init__(self, slots: torch.Tensor, device: torch.device, *, extent_bytes: int = EXTENT_BYTES) -> None:
        """Map `slots` (as `slots_tensor` gives them) for `device`, which pins the first of them."""
        self._host = slots
        self._device = device
        num_slots, slot_bytes = slots.shape
        self._extents = Extents(num_slots=num_slots, slot_bytes=slot_bytes, pin=self._pin, extent_bytes=extent_bytes)
        self.is_unpinned = not self._extents.reach_first()
        with torch.cuda.device(device):
            mapped: Any = _Mapped(slots.data_ptr(), (num_slots, slot_bytes))
            # one address on both sides, extent by extent
            self._slots = slots if self.is_unpinned else torch.as_tensor(mapped, device=device)
            self._save_stream = torch.cuda.Stream(device)
            self._load_stream = torch.cuda.Stream(device)
        self._saved = _Waiter("prfaas-saves")
        self._loaded = _Waiter("prfaas-loads")
        self._last_save: torch.cuda.Event | None = None
        self._indices: tuple[_IndexKey, torch.Tensor, torch.Tensor] | None = None

    def _pin(self, offset: int, num_bytes: int) -> bool:
        """On the thread of the extents: CUDA keeps the error of a failure for that thread's next call."""
        with torch.cuda.device(self._device):
            address = self._host.data_ptr() + offset
            result = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _MAPPED_AND_PORTABLE))
        if result:
            _log.error("arena.not_pinned", first_bytes=offset, num_bytes=num_bytes, cuda_error=result)
        return not result

    def save(self, layer: LayerBlocks, block_ids: Sequence[int], slots: Sequence[int]) -> int:
        start, size = layer.slice.offset_bytes, layer.slice.payload_bytes
        self._save_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._save_stream):
            indices, memory = self._prepare(block_ids, slots)
            pages, target = _as_words(layer.pages, memory[:, start : start + size])
            there = target.device
            target.index_copy_(0, indices[1].to(there), pages.index_select(0, indices[0]).to(there))
            self._last_save = _record(self._save_stream)
        return len(slots) * size

    def load(self, layer: LayerBlocks, block_ids: Sequence[int], slots: Sequence[int]) -> int:
        start, size = layer.slice.offset_bytes, layer.slice.payload_bytes
        self._load_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._load_stream):
            indices, memory = self._prepare(block_ids, slots)
            pages, source = _as_words(layer.pages, memory[:, start : start + size])
            found = source.index_select(0, indices[1].to(source.device))
            pages.index_copy_(0, indices[0], found.to(self._device))
        return len(slots) * size

    def _prepare(self, block_ids: Sequence[int], slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Once for all layers of a span: both lists as one tensor [2, n] on the current stream, and the slots as the device
        reaches them, or as the host does where it cannot."""
        key = torch.cuda.current_stream(self._device).cuda_stream, tuple(block_ids), tuple(slots)
        if self._indices is None or self._indices[0] != key:
            host = torch.tensor(key[1:], dtype=torch.int64).pin_memory()
            memory = self._slots if self._extents.reach(slots) else self._host
            self._indices = key, host.to(self._device, non_blocking=True), memory
        return self._indices[1:]

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
        for offset in self._extents.close():
            torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr() + offset)


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
