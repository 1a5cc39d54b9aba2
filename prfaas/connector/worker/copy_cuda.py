"""Copies between an engine's blocks in GPU memory and the agent's slots, and the pinned extents of the arena.

The model's thread records an event and puts the copies of a layer or step into a queue. A thread for each direction issues
them as one batch. The blocks of a save stay allocated until the scheduler hears that it is complete.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any

import torch

from prfaas import logs
from prfaas.agent.engine.client import AgentClient
from prfaas.cachepool.arena import PAGE_BYTES, shape_of
from prfaas.connector.worker import numa
from prfaas.connector.worker.copy_host import BlockPairs, HostCopier, LayerBlocks, LayerCopy, slots_tensor
from prfaas.kv.layout import Layout

# Pinning takes 0.1 s per GB (vLLM pull request 51081, H200), and the driver may delay other threads meanwhile.
EXTENT_BYTES = 64 << 20
_MAPPED_AND_PORTABLE = 0x02 | 0x01  # cudaHostRegisterMapped | cudaHostRegisterPortable
_log = logs.get("connector.worker")
Event = Any
Stream = Any
# Copies sizes[i] bytes from sources[i] to targets[i] on the current stream. All are int64 tensors in host memory.
CopyBatch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], None]
_Task = tuple[Event, Sequence[LayerCopy], Callable[[], None]]  # `done` is called after the copies.
Addresses = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # Sources, targets and sizes; each of shape [copy].


class CudaDevice:
    """Operations of a GPU that copies need. Only `mark` and `snapshot` are called on the model's thread.

    `copy_batch` issues a batch on the current stream.
    """

    def __init__(self, device: torch.device, copy_batch: CopyBatch) -> None:
        self._device = device
        self._copy_batch = copy_batch

    def mark(self) -> Event:
        """Return an event after the model's work so far."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def snapshot(self, pages: torch.Tensor, block_ids: Sequence[int]) -> torch.Tensor:
        """Return a copy of blocks on the device, made after the model's work so far and before later work."""
        # Pinning these few numbers could wait; the driver takes them from pageable memory at once.
        indices = torch.tensor(block_ids).to(self._device, non_blocking=True)
        return pages.index_select(0, indices)

    def open_stream(self) -> Stream:
        """Prepare the calling thread for copies, and return its stream."""
        torch.cuda.set_device(self._device)
        if (node := numa.node_of(self._device)) is not None:
            numa.bind_thread(node)
        return torch.cuda.Stream(self._device, priority=0)  # The lowest priority.

    def launch(self, stream: Stream, after: Event, addresses: Addresses, *, is_load: bool) -> Event:
        """Issue copies after an event; return the event of their end."""
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            self._copy_batch(*addresses, is_load)
            end = torch.cuda.Event(blocking=True)
            end.record(stream)
        return end

    def wait(self, event: Event) -> None:
        event.synchronize()

    def pin(self, address: int, num_bytes: int) -> bool:
        """Pin host memory; return whether that succeeded."""
        return not int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _MAPPED_AND_PORTABLE))

    def unpin(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


class Extents:
    """Pinned extents of an arena, each of whole pages and whole rows of slots. Any thread may call."""

    def __init__(
        self,
        *,
        num_slots: int,
        slot_bytes: int,
        pin: Callable[[int, int], bool],
        slots_per_row: int = 1,
        extent_bytes: int = EXTENT_BYTES,
    ) -> None:
        """Pin nothing yet. `pin` takes an offset from the first slot and a number of bytes; it returns whether it worked."""
        self._pin = pin
        self._total_bytes = num_slots * slot_bytes
        aligned_bytes = lcm(PAGE_BYTES, slots_per_row * slot_bytes)
        self._extent_bytes = max(1, extent_bytes // aligned_bytes) * aligned_bytes
        self._slots_each = self._extent_bytes // slot_bytes
        self._pinned: dict[int, bool] = {}  # By number of the extent; False if pinning failed.
        self._lock = threading.Lock()

    def use(self, slots: Iterable[int]) -> None:
        """Pin the extents of these slots. Memory that cannot be pinned is copied more slowly."""
        with self._lock:
            for extent in {slot // self._slots_each for slot in slots} - self._pinned.keys():
                offset = extent * self._extent_bytes
                num_bytes = min(self._extent_bytes, self._total_bytes - offset)
                self._pinned[extent] = self._pin(offset, num_bytes)

    def pinned(self) -> list[int]:
        """Return the offsets of pinned extents."""
        return sorted(extent * self._extent_bytes for extent, is_pinned in self._pinned.items() if is_pinned)


class CudaCopier:
    """Copier for blocks in GPU memory. The engine does not wait for copies, and `done` runs on another thread.

    States that the next step overwrites are first copied within GPU memory.
    """

    stages_states = True

    def __init__(
        self,
        slots: Sequence[torch.Tensor],
        device: CudaDevice,
        *,
        slots_per_row: int = 1,
        extent_bytes: int = EXTENT_BYTES,
    ) -> None:
        """Start a thread for each direction. `slots` are those of each arena, shape [slot, byte]."""
        self._slots = slots
        self._device = device
        self._extents = [
            Extents(
                num_slots=len(own),
                slot_bytes=own.stride(0),
                pin=partial(self._pin, own),
                slots_per_row=slots_per_row,
                extent_bytes=extent_bytes,
            )
            for own in slots
        ]
        self._saves = _CopyThread("prfaas-saves", device, partial(self._launch, is_load=False))
        self._loads = _CopyThread("prfaas-loads", device, partial(self._launch, is_load=True))

    def _pin(self, slots: torch.Tensor, offset: int, num_bytes: int) -> bool:
        is_pinned = self._device.pin(slots.data_ptr() + offset, num_bytes)
        if not is_pinned:
            _log.error("arena.pin_failed", first_bytes=offset, num_bytes=num_bytes)
        return is_pinned

    def save(self, copies: Sequence[LayerCopy], done: Callable[[], None]) -> None:
        self._saves.add([self._stable(*copy) for copy in copies], done)

    def _stable(self, layer: LayerBlocks, pairs: BlockPairs) -> LayerCopy:
        """Return a copy whose source the model does not overwrite before it is made."""
        if not layer.is_overwritten:
            return layer, pairs
        pages = self._device.snapshot(layer.pages, pairs.block_ids)
        return replace(layer, pages=pages), BlockPairs(list(range(len(pairs.slots))), pairs.slots)

    def load(self, copies: Sequence[LayerCopy], done: Callable[[], None]) -> None:
        self._loads.add(copies, done)

    def _launch(self, stream: Stream, after: Event, copies: Sequence[LayerCopy], *, is_load: bool) -> Event:
        """Issue copies as one batch. Runs on the thread of its direction, which may wait for memory to be pinned."""
        blocks, memory, sizes = [], [], []
        numbers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # All layers of a group have the same pairs.
        for layer, pairs in copies:
            if id(pairs) not in numbers:
                self._extents[layer.arena].use(pairs.slots)
                numbers[id(pairs)] = torch.tensor(pairs.block_ids), torch.tensor(pairs.slots)
            block_ids, slots = numbers[id(pairs)]
            arena = self._slots[layer.arena]
            blocks.append(layer.pages.data_ptr() + block_ids * layer.pages.stride(0))
            memory.append(arena.data_ptr() + slots * arena.stride(0) + layer.slice.offset_bytes)
            sizes.append(torch.full_like(slots, layer.slice.payload_bytes))
        sources, targets = (memory, blocks) if is_load else (blocks, memory)
        addresses = torch.cat(sources), torch.cat(targets), torch.cat(sizes)
        return self._device.launch(stream, after, addresses, is_load=is_load)

    def close(self) -> None:
        """End the threads after the copies so far, and unpin the arenas."""
        self._saves.close()
        self._loads.close()
        for slots, extents in zip(self._slots, self._extents, strict=True):
            for offset in extents.pinned():
                self._device.unpin(slots.data_ptr() + offset)


class _CopyThread:
    """Thread that issues copies in order, and calls `done` after each. It issues all that wait before it waits itself."""

    def __init__(
        self, name: str, device: CudaDevice, launch: Callable[[Stream, Event, Sequence[LayerCopy]], Event]
    ) -> None:
        self._device = device
        self._launch = launch
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, copies: Sequence[LayerCopy], done: Callable[[], None]) -> None:
        """Add copies to make after the model's work so far, and a function to call after them.

        Raises:
            RuntimeError: An earlier copy has failed.
        """
        if self._failure is not None:
            raise RuntimeError("copies between engine blocks and the pool have failed") from self._failure
        self._queue.put((self._device.mark(), copies, done))

    def _run(self) -> None:
        try:
            self._serve(self._device.open_stream())
        except BaseException as error:
            self._failure = error
            _log.error("copy.failed", message=str(error))

    def _serve(self, stream: Stream) -> None:
        issued: deque[_Task] = deque()
        is_open = True
        while is_open or issued:
            if is_open and (not issued or not self._queue.empty()):
                is_open = self._issue_next(stream, issued)
            else:
                self._await_first(issued)

    def _issue_next(self, stream: Stream, issued: deque[_Task]) -> bool:
        """Issue the next copies, and return whether there were any before the thread's end."""
        task = self._queue.get()
        if task is None:
            return False
        after, copies, done = task
        issued.append((self._launch(stream, after, copies) if copies else after, copies, done))
        return True

    def _await_first(self, issued: deque[_Task]) -> None:
        # Until their end the copies are referred to, since the device would give a snapshot's memory to the model.
        event, _, done = issued[0]
        self._device.wait(event)
        issued.popleft()
        done()

    def close(self) -> None:
        """End the thread after the copies so far."""
        self._queue.put(None)
        self._thread.join()


Copier = HostCopier | CudaCopier


def copier_for(
    client: AgentClient, layout: Layout, *, device: torch.device, copy_batch: CopyBatch | None = None
) -> Copier:
    """Return a copier between blocks on `device` and the arenas that the client has mapped. A GPU needs `copy_batch`."""
    agent = client.attached
    slots = [
        slots_tensor(arena, header_bytes=agent.header_bytes, slot_bytes=agent.slot_bytes, num_slots=agent.num_slots)
        for arena in client.arenas
    ]
    if device.type != "cuda":
        return HostCopier(slots)
    assert copy_batch is not None
    return CudaCopier(slots, CudaDevice(device, copy_batch), slots_per_row=shape_of(layout).slots_per_row)
