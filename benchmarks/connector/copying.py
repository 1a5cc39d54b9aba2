"""Cost of copying blocks to slots: bytes per second, host time per call, and slowdown of the model on a GPU.

Without a GPU a pretended one counts the calls of a step: launches, events, uploads and wake-ups.
"""

from __future__ import annotations

import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from prfaas.connector.worker.copy_cuda import Copier, CudaCopier, CudaDevice
from prfaas.connector.worker.copy_host import (
    BlockPairs,
    HostCopier,
    LayerBlocks,
    LayerCopy,
    pages_of,
    slots_tensor,
)
from prfaas.kv.parts import LayerSlice
from tests.support.counting_device import CountingDevice

NUM_LAYERS, NUM_BLOCKS, BLOCK_BYTES = 16, 512, 64 << 10  # 8K tokens in blocks of 16, 4 KiB per token and layer.
NUM_COPIED = 512
REPEATS = 7
WARM_UP = 2


def measure() -> dict[str, Any]:
    """Gigabytes per second and microseconds per call; on a GPU also what the model loses beside it."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    slots = _slots()
    copier = _cuda_copier(slots, device) if on_gpu else HostCopier([slots])
    layers = [_layer(index, device) for index in range(NUM_LAYERS)]
    total = NUM_LAYERS * NUM_COPIED * BLOCK_BYTES
    calls = _times(lambda done: _save(copier, layers, done), waits=False)
    results: dict[str, Any] = {
        "device": str(device),
        "layers": NUM_LAYERS,
        "blocks": NUM_COPIED,
        "block_bytes": BLOCK_BYTES,
        "save_gigabytes_per_second": _spread(
            [total / 1e9 / item for item in _times(lambda done: _save(copier, layers, done))]
        ),
        "load_gigabytes_per_second": _spread(
            [total / 1e9 / item for item in _times(lambda done: copier.load(_copies(layers), done))]
        ),
        "save_call_microseconds": _spread([call / NUM_LAYERS * 1e6 for call in calls]),
    }
    results |= _beside_a_model(copier, layers) if on_gpu else {"calls_of_a_step": _calls_of_a_step()}
    copier.close()
    return results


def _calls_of_a_step() -> dict[str, Any]:
    """Return the number of calls to save or load a step, at its end or layer by layer."""
    layers = [_layer(index, torch.device("cpu")) for index in range(NUM_LAYERS)]
    counts = {}
    works: dict[str, Callable[[Copier, Callable[[], None]], None]] = {
        "save": lambda copier, done: copier.save(_copies(layers), done),
        "save by layer": lambda copier, done: _save(copier, layers, done),
        "load": lambda copier, done: copier.load(_copies(layers), done),
    }
    for name, work in works.items():
        device, done = CountingDevice(), threading.Event()
        copier = CudaCopier([_slots()], device)
        work(copier, done.set)
        done.wait()
        counts[name] = dict(device.calls) | {"threads that may wait": sorted(device.waiting_threads)}
        copier.close()
    return counts


def _slots() -> torch.Tensor:
    memory = os.memfd_create("arena")
    os.ftruncate(memory, NUM_COPIED * NUM_LAYERS * BLOCK_BYTES)
    mapped = mmap.mmap(memory, 0)
    os.close(memory)
    return slots_tensor(memoryview(mapped), header_bytes=0, slot_bytes=NUM_LAYERS * BLOCK_BYTES, num_slots=NUM_COPIED)


def _cuda_copier(slots: torch.Tensor, device: torch.device) -> Copier:
    from vllm._custom_ops import swap_blocks_batch  # noqa: PLC0415  needs vLLM

    return CudaCopier([slots], CudaDevice(device, swap_blocks_batch))


def _layer(index: int, device: torch.device) -> LayerBlocks:
    cache = torch.randint(0, 256, (NUM_BLOCKS, 1, 1, BLOCK_BYTES), dtype=torch.uint8, device=device)
    pages = pages_of(f"layer {index}", cache, NUM_BLOCKS)
    return LayerBlocks(0, index, LayerSlice(f"layer {index}", index * BLOCK_BYTES, BLOCK_BYTES, "uint8", "byte"), pages)


# Slots are scattered, as in a pool in use.
_PAIRS = BlockPairs(list(range(NUM_COPIED)), [(7 * slot) % NUM_COPIED for slot in range(NUM_COPIED)])


def _copies(layers: list[LayerBlocks]) -> list[LayerCopy]:
    return [(layer, _PAIRS) for layer in layers]


def _save(copier: Copier, layers: list[LayerBlocks], done: Callable[[], None]) -> None:
    """Save layer by layer."""
    for copy in _copies(layers)[:-1]:
        copier.save([copy], lambda: None)
    copier.save(_copies(layers)[-1:], done)


def _times(work: Callable[[Callable[[], None]], None], *, waits: bool = True) -> list[float]:
    """Return seconds of each repeat until `work` has called its argument, or without `waits` until it returns."""
    seconds = []
    for _ in range(WARM_UP + REPEATS):
        done, start = threading.Event(), time.perf_counter()
        work(done.set)
        if waits:
            done.wait()
        seconds.append(time.perf_counter() - start)
        done.wait()
    return seconds[WARM_UP:]


def _beside_a_model(copier: Copier, layers: list[LayerBlocks]) -> dict[str, Any]:
    """Matrix products with and without a save after each: what the copies take from the compute stream."""
    left = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    right = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")

    def products(*, saving: bool) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        done = threading.Event()
        begin.record()
        for layer in layers:
            for _ in range(8):
                torch.mm(left, right)
            if saving:
                copier.save(_copies([layer]), lambda: None)
        end.record()
        end.synchronize()
        copier.save([], done.set)
        done.wait()
        return float(begin.elapsed_time(end))

    alone, beside = [], []
    for _ in range(WARM_UP + REPEATS):  # A against B, turn by turn
        alone.append(products(saving=False))
        beside.append(products(saving=True))
    return {
        "model_alone_milliseconds": _spread(alone[WARM_UP:]),
        "model_beside_saves_milliseconds": _spread(beside[WARM_UP:]),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}
