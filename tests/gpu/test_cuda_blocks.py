"""Copies between GPU blocks and slots on a real GPU: right bytes, after the model's work, beside its later work."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm._custom_ops import swap_blocks_batch

from prfaas.connector.worker.copy_cuda import CudaCopier, CudaDevice
from prfaas.connector.worker.copy_host import BlockPairs, LayerBlocks, pages_of, slots_tensor
from prfaas.kv.parts import LayerSlice

pytestmark = pytest.mark.gpu
NUM_BLOCKS, NUM_SLOTS = 64, 48
HEADER_BYTES, SLOT_BYTES = 4096, 1 << 17
EXTENT_BYTES = 8 * SLOT_BYTES
SLEEP_CYCLES = 400_000_000  # About 0.2 s at 2 GHz, much longer than any copy here.


@dataclass
class Bench:
    """A copier over a mapped memfd, as the agent's arena is one."""

    copier: CudaCopier
    slots: torch.Tensor

    def save(self, cache: torch.Tensor, blocks: Sequence[int], slots: Sequence[int], **more: Any) -> threading.Event:
        return self._copy(self.copier.save, cache, blocks, slots, **more)

    def load(self, cache: torch.Tensor, blocks: Sequence[int], slots: Sequence[int], **more: Any) -> threading.Event:
        return self._copy(self.copier.load, cache, blocks, slots, **more)

    def _copy(
        self,
        copy: Callable[..., None],
        cache: torch.Tensor,
        blocks: Sequence[int],
        slots: Sequence[int],
        *,
        offset: int = 0,
        is_overwritten: bool = False,
    ) -> threading.Event:
        pages, done = pages_of("layer", cache, NUM_BLOCKS), threading.Event()
        slice_ = LayerSlice("layer", offset, pages.shape[1], "uint8", "byte")
        layer = LayerBlocks(0, 0, slice_, pages, is_overwritten)
        copy([(layer, BlockPairs(list(blocks), list(slots)))], done.set)
        return done


@pytest.fixture
def bench() -> Iterator[Bench]:
    memory = os.memfd_create("arena")
    os.ftruncate(memory, HEADER_BYTES + NUM_SLOTS * SLOT_BYTES)
    mapped = mmap.mmap(memory, 0)
    os.close(memory)
    slots = slots_tensor(memoryview(mapped), header_bytes=HEADER_BYTES, slot_bytes=SLOT_BYTES, num_slots=NUM_SLOTS)
    device = CudaDevice(torch.device("cuda", torch.cuda.current_device()), swap_blocks_batch)
    copier = CudaCopier([slots], device, extent_bytes=EXTENT_BYTES)
    yield Bench(copier, slots)
    copier.close()


def random_cache(payload_bytes: int, *, stride_bytes: int | None = None) -> torch.Tensor:
    """[block, 1, 1, payload] bytes with padding between blocks."""
    stride = stride_bytes or payload_bytes
    raw = torch.randint(0, 256, (NUM_BLOCKS * stride,), dtype=torch.uint8, device="cuda")
    return raw.as_strided((NUM_BLOCKS, 1, 1, payload_bytes), (stride, payload_bytes, payload_bytes, 1))


@pytest.mark.parametrize("payload", [65_536, 34_688, 1_004, 777])
@pytest.mark.parametrize("offset", [0, 4_096, 12])
def test_saved_bytes_are_those_of_the_blocks(bench: Bench, payload: int, offset: int) -> None:
    cache = random_cache(payload, stride_bytes=payload + 1_016)
    blocks, slots = [5, 6, 7, 63, 1], [10, 11, 12, 0, 47]
    assert bench.save(cache, blocks, slots, offset=offset).wait(20)
    for block, slot in zip(blocks, slots, strict=True):
        assert torch.equal(bench.slots[slot, offset : offset + payload], cache[block].flatten().cpu())
    assert not bench.slots[1].any()  # This slot was not named.


@pytest.mark.parametrize("payload", [65_536, 34_688, 777])
def test_loaded_blocks_are_those_of_the_slots_and_no_others_change(bench: Bench, payload: int) -> None:
    bench.slots.copy_(torch.randint(0, 256, bench.slots.shape, dtype=torch.uint8))
    cache = random_cache(payload, stride_bytes=payload + 1_016)
    before = cache.cpu()
    blocks, slots = [9, 3, 60], [4, 5, 40]
    assert bench.load(cache, blocks, slots, offset=64).wait(20)
    for block, slot in zip(blocks, slots, strict=True):
        before[block, 0, 0] = bench.slots[slot, 64 : 64 + payload]
    assert torch.equal(cache.cpu(), before)


def test_a_save_follows_the_models_work_so_far(bench: Bench) -> None:
    cache = random_cache(4_096)
    torch.cuda._sleep(SLEEP_CYCLES)
    cache.fill_(7)
    assert bench.save(cache, [2], [2]).wait(20)
    assert (bench.slots[2, :4_096] == 7).all()


def test_the_models_thread_does_not_wait_for_copies(bench: Bench) -> None:
    cache = random_cache(4_096)
    assert bench.save(cache, [1], [1]).wait(20) and bench.load(cache, [1], [1]).wait(20)  # The first use pins.
    torch.cuda._sleep(5 * SLEEP_CYCLES)
    start = time.perf_counter()
    saved, loaded = bench.save(cache, [2, 3], [2, 3]), bench.load(cache, [4, 5], [2, 3])
    assert time.perf_counter() - start < 0.05 and not saved.is_set() and not loaded.is_set()
    assert saved.wait(20) and loaded.wait(20)


@pytest.mark.parametrize("is_overwritten", [False, True])
def test_only_a_snapshot_survives_what_the_model_writes_next(bench: Bench, is_overwritten: bool) -> None:
    """Other blocks stay allocated until the scheduler has heard of the end of their save."""
    cache = random_cache(4_096)
    cache.fill_(1)
    torch.cuda._sleep(SLEEP_CYCLES)
    done = bench.save(cache, [3], [3], is_overwritten=is_overwritten)
    cache.fill_(2)
    assert done.wait(20)
    if is_overwritten:
        assert (bench.slots[3, :4_096] == 1).all()


def test_blocks_of_all_extents_travel_in_one_copy(bench: Bench) -> None:
    source, target = random_cache(8_192), random_cache(8_192)
    blocks = list(range(NUM_SLOTS))
    assert bench.save(source, blocks, blocks).wait(20)
    assert torch.equal(bench.slots[:, :8_192], source[:NUM_SLOTS, 0, 0].cpu())
    assert bench.load(target, blocks, blocks).wait(20)
    assert torch.equal(source[:NUM_SLOTS].cpu(), target[:NUM_SLOTS].cpu())


@pytest.mark.parametrize("extent", [0, 2])
def test_memory_that_cannot_be_pinned_is_copied_all_the_same(bench: Bench, extent: int) -> None:
    taken = bench.slots.data_ptr() + extent * EXTENT_BYTES
    assert int(torch.cuda.cudart().cudaHostRegister(taken, EXTENT_BYTES, 0)) == 0  # CUDA pins nothing twice.
    source, target = random_cache(8_192), random_cache(8_192)
    for span in ([0, 5], [15, 16, 17], [40, 47]):
        assert bench.save(source, span, span).wait(20)
        assert torch.equal(bench.slots[span, :8_192], source[span, 0, 0].cpu())
        assert bench.load(target, span, span).wait(20)
        assert torch.equal(source[span].cpu(), target[span].cpu())
    bench.copier.close()
    torch.cuda.cudart().cudaHostUnregister(taken)
    torch.cuda.synchronize()  # Raises if an error is left.
