"""GPU that is only pretended: copies within host memory, and counts the calls of the copy path."""

import ctypes
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from prfaas.connector.worker.copy_cuda import Addresses, CudaDevice


@dataclass
class CountingDevice(CudaDevice):
    """Device whose streams run as soon as `gate` is open. `calls` counts by name, and by thread the calls that can wait."""

    pinnable_bytes: int = 1 << 62
    gate: threading.Event = field(default_factory=threading.Event)
    calls: Counter[str] = field(default_factory=Counter)
    waiting_threads: Counter[str] = field(default_factory=Counter)
    pinned: list[tuple[int, int]] = field(default_factory=list)
    failure: Exception | None = None
    snapshots: weakref.WeakSet[torch.Tensor] = field(default_factory=weakref.WeakSet)
    kept: list[int] = field(default_factory=list)  # Number of snapshots at each wait.

    def __post_init__(self) -> None:
        self.gate.set()

    def mark(self) -> object:
        self.calls["event"] += 1  # Recorded on the model's stream.
        return object()

    def snapshot(self, pages: torch.Tensor, block_ids: Sequence[int]) -> torch.Tensor:
        self.calls["index upload"] += 1
        self.calls["launch"] += 1
        copy = pages[torch.tensor(block_ids)].clone()
        self.snapshots.add(copy)
        return copy

    def open_stream(self) -> str:
        return threading.current_thread().name

    def launch(self, stream: str, after: object, addresses: Addresses, *, is_load: bool) -> object:
        self._may_wait()
        if self.failure is not None:
            raise self.failure
        self.calls["event"] += 2  # The stream waits for one and records one.
        self.calls["launch"] += 1
        self.gate.wait()
        for source, target, size in zip(*map(torch.Tensor.tolist, addresses), strict=True):
            ctypes.memmove(target, source, size)
        return object()

    def wait(self, event: object) -> None:
        self._may_wait()
        self.calls["event"] += 1
        self.calls["wake-up"] += 1
        self.kept.append(len(self.snapshots))

    def pin(self, address: int, num_bytes: int) -> bool:
        self._may_wait()
        self.pinnable_bytes -= num_bytes
        if self.pinnable_bytes < 0:
            return False
        self.pinned.append((address, num_bytes))
        return True

    def unpin(self, address: int) -> None:
        self.pinned = [extent for extent in self.pinned if extent[0] != address]

    def _may_wait(self) -> None:
        self.waiting_threads[threading.current_thread().name] += 1
