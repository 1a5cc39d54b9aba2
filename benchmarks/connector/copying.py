"""Cost of copying blocks to slots: bytes per second, host time per call, and slowdown of the model on a GPU."""

from __future__ import annotations

import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from prfaas.connector.worker.copy_host import Copier, HostCopier, LayerBlocks, pages_of, slots_tensor
from prfaas.kv.parts import LayerSlice

NUM_LAYERS, NUM_BLOCKS, BLOCK_BYTES = 16, 512, 64 << 10  # 8K tokens in blocks of 16, 4 KiB per token and layer.
NUM_COPIED = 512
REPEATS = 7
WARM_UP = 2


def measure() -> dict[str, Any]:
    """Gigabytes per second and microseconds per call; on a GPU also what the model loses beside it."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    slots = _slots()
    copier = _cuda_copier(slots, device) if on_gpu else HostCopier(slots)
    layers = [_layer(index, device) for index in range(NUM_LAYERS)]
    total = NUM_LAYERS * NUM_COPIED * BLOCK_BYTES
    calls = _times(lambda: _save(copier, layers), None)
    results: dict[str, Any] = {
        "device": str(device),
        "layers": NUM_LAYERS,
        "blocks": NUM_COPIED,
        "block_bytes": BLOCK_BYTES,
        "save_gigabytes_per_second": _spread(
            [total / 1e9 / item for item in _times(lambda: _save(copier, layers), copier.then_saved)]
        ),
        "load_gigabytes_per_second": _spread(
            [total / 1e9 / item for item in _times(lambda: _load(copier, layers), copier.then_loaded)]
        ),
        "save_call_microseconds": _spread([call / NUM_LAYERS * 1e6 for call in calls]),
    }
    if on_gpu:
        _wait(copier.then_saved)
        results |= _beside_a_model(copier, layers)
    copier.close()
    return results


def _slots() -> torch.Tensor:
    memory = os.memfd_create("arena")
    os.ftruncate(memory, NUM_COPIED * NUM_LAYERS * BLOCK_BYTES)
    mapped = mmap.mmap(memory, 0)
    os.close(memory)
    return slots_tensor(memoryview(mapped), header_bytes=0, slot_bytes=NUM_LAYERS * BLOCK_BYTES, num_slots=NUM_COPIED)


def _cuda_copier(slots: torch.Tensor, device: torch.device) -> Copier:
    from prfaas.connector.worker.copy_cuda import CudaCopier  # noqa: PLC0415  needs CUDA

    return CudaCopier(slots, device)


def _layer(index: int, device: torch.device) -> LayerBlocks:
    cache = torch.randint(0, 256, (NUM_BLOCKS, 1, 1, BLOCK_BYTES), dtype=torch.uint8, device=device)
    pages = pages_of(f"layer {index}", cache, NUM_BLOCKS)
    return LayerBlocks(0, index, LayerSlice(f"layer {index}", index * BLOCK_BYTES, BLOCK_BYTES, "uint8", "byte"), pages)


_BLOCKS = list(range(NUM_COPIED))
_SLOTS = [(7 * slot) % NUM_COPIED for slot in range(NUM_COPIED)]  # Scattered, as in a pool in use.


def _save(copier: Copier, layers: list[LayerBlocks]) -> None:
    for layer in layers:
        copier.save(layer, _BLOCKS, _SLOTS)


def _load(copier: Copier, layers: list[LayerBlocks]) -> None:
    for layer in layers:
        copier.load(layer, _BLOCKS, _SLOTS)


def _wait(then: Callable[[Callable[[], None]], None]) -> None:
    done = threading.Event()
    then(done.set)
    done.wait()


def _times(work: Callable[[], None], then: Callable[[Callable[[], None]], None] | None) -> list[float]:
    """Return seconds of each repeat; without `then` only the calls themselves."""
    seconds = []
    for _ in range(WARM_UP + REPEATS):
        start = time.perf_counter()
        work()
        if then is not None:
            _wait(then)
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


def _beside_a_model(copier: Copier, layers: list[LayerBlocks]) -> dict[str, Any]:
    """Matrix products with and without a save after each: what the copies take from the compute stream."""
    left = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    right = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")

    def products(*, saving: bool) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for layer in layers:
            for _ in range(8):
                torch.mm(left, right)
            if saving:
                copier.save(layer, _BLOCKS, _SLOTS)
        end.record()
        end.synchronize()
        _wait(copier.then_saved)
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
