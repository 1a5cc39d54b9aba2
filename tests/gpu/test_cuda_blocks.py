"""Copies between GPU blocks and pinned slots: right bytes, no waiting host, nothing overwritten that is still read."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from prfaas.connector.worker.copy_cuda import CudaCopier
from prfaas.connector.worker.copy_host import LayerBlocks, pages_of, slots_tensor
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

    def layer(self, cache: torch.Tensor, *, offset: int = 0) -> LayerBlocks:
        pages = pages_of("layer", cache, NUM_BLOCKS)
        return LayerBlocks(0, 0, LayerSlice("layer", offset, pages.shape[1], "uint8", "byte"), pages)

    def wait(self, then: Callable[[Callable[[], None]], None]) -> None:
        done = threading.Event()
        then(done.set)
        assert done.wait(20), "the callback did not come"


@pytest.fixture
def bench() -> Iterator[Bench]:
    slots = slots_of_an_arena()
    copier = CudaCopier(slots, torch.device("cuda", torch.cuda.current_device()), extent_bytes=EXTENT_BYTES)
    yield Bench(copier, slots)
    copier.close()


def slots_of_an_arena() -> torch.Tensor:
    memory = os.memfd_create("arena")
    os.ftruncate(memory, HEADER_BYTES + NUM_SLOTS * SLOT_BYTES)
    mapped = mmap.mmap(memory, 0)
    os.close(memory)
    return slots_tensor(memoryview(mapped), header_bytes=HEADER_BYTES, slot_bytes=SLOT_BYTES, num_slots=NUM_SLOTS)


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
    assert bench.copier.save(bench.layer(cache, offset=offset), blocks, slots) == 5 * payload
    bench.wait(bench.copier.then_saved)
    for block, slot in zip(blocks, slots, strict=True):
        assert torch.equal(bench.slots[slot, offset : offset + payload], cache[block].flatten().cpu())
    assert not bench.slots[1].any()  # This slot was not named.


@pytest.mark.parametrize("payload", [65_536, 34_688, 777])
def test_loaded_blocks_are_those_of_the_slots_and_no_others_change(bench: Bench, payload: int) -> None:
    bench.slots.copy_(torch.randint(0, 256, bench.slots.shape, dtype=torch.uint8))
    cache = random_cache(payload, stride_bytes=payload + 1_016)
    before = cache.cpu()
    blocks, slots = [9, 3, 60], [4, 5, 40]
    bench.copier.load(bench.layer(cache, offset=64), blocks, slots)
    bench.wait(bench.copier.then_loaded)
    for block, slot in zip(blocks, slots, strict=True):
        before[block, 0, 0] = bench.slots[slot, 64 : 64 + payload]
    assert torch.equal(cache.cpu(), before)


def test_a_save_follows_what_the_model_has_queued(bench: Bench) -> None:
    cache = random_cache(4_096)
    torch.cuda._sleep(SLEEP_CYCLES)
    cache.fill_(7)
    bench.copier.save(bench.layer(cache), [2], [2])
    bench.wait(bench.copier.then_saved)
    assert (bench.slots[2, :4_096] == 7).all()


def test_the_host_does_not_wait_for_copies(bench: Bench) -> None:
    cache = random_cache(4_096)
    bench.copier.save(bench.layer(cache), [1], [1])  # The first use loads the kernels.
    bench.copier.load(bench.layer(cache), [1], [1])
    torch.cuda.synchronize()
    done = threading.Event()
    torch.cuda._sleep(5 * SLEEP_CYCLES)
    start = time.perf_counter()
    bench.copier.save(bench.layer(cache), [2, 3], [2, 3])
    bench.copier.load(bench.layer(cache), [4, 5], [2, 3])
    bench.copier.then_saved(done.set)
    bench.copier.fence()
    elapsed = time.perf_counter() - start
    assert elapsed < 0.05 and not done.is_set()
    torch.cuda.synchronize()
    assert done.wait(5)


def test_a_fence_keeps_later_work_from_overwriting_what_is_read(bench: Bench) -> None:
    cache = random_cache(4_096)
    cache.fill_(1)
    with torch.cuda.stream(bench.copier._save_stream):
        torch.cuda._sleep(SLEEP_CYCLES)  # The save starts late.
    bench.copier.save(bench.layer(cache), [3], [3])
    bench.copier.fence()
    cache.fill_(2)
    bench.wait(bench.copier.then_saved)
    assert (bench.slots[3, :4_096] == 1).all()


def test_without_a_fence_later_work_does_overwrite(bench: Bench) -> None:
    """Shows that the test above can fail."""
    cache = random_cache(4_096)
    cache.fill_(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(bench.copier._save_stream):
        torch.cuda._sleep(SLEEP_CYCLES)
    bench.copier.save(bench.layer(cache), [3], [3])
    cache.fill_(2)
    bench.wait(bench.copier.then_saved)
    assert (bench.slots[3, :4_096] == 2).all()


def test_callbacks_come_in_order(bench: Bench) -> None:
    cache, seen = random_cache(4_096), []
    for number in range(20):
        bench.copier.save(bench.layer(cache), [number], [number])
        bench.copier.then_saved(lambda number=number: seen.append(number))  # type: ignore[misc]
    bench.wait(bench.copier.then_saved)
    assert seen == list(range(20))


def test_saves_and_loads_may_overlap(bench: Bench) -> None:
    source, target = random_cache(8_192), random_cache(8_192)
    for start in range(0, 40, 8):
        blocks = list(range(start, start + 8))
        bench.copier.save(bench.layer(source), blocks, blocks)
        bench.wait(bench.copier.then_saved)
        bench.copier.load(bench.layer(target), blocks, blocks)
    bench.wait(bench.copier.then_loaded)
    assert torch.equal(source[:40].cpu(), target[:40].cpu())


def test_blocks_of_all_extents_travel_in_one_copy(bench: Bench) -> None:
    source, target = random_cache(8_192), random_cache(8_192)
    blocks = list(range(NUM_SLOTS))
    bench.copier.save(bench.layer(source), blocks, blocks)
    bench.wait(bench.copier.then_saved)
    assert torch.equal(bench.slots[:, :8_192], source[:NUM_SLOTS, 0, 0].cpu())
    bench.copier.load(bench.layer(target), blocks, blocks)
    bench.wait(bench.copier.then_loaded)
    assert torch.equal(source[:NUM_SLOTS].cpu(), target[:NUM_SLOTS].cpu())


@pytest.mark.parametrize("first_extent", [0, 2])
def test_what_cannot_be_pinned_is_copied_all_the_same(first_extent: int) -> None:
    slots = slots_of_an_arena()
    taken = slots.data_ptr() + first_extent * EXTENT_BYTES
    assert int(torch.cuda.cudart().cudaHostRegister(taken, EXTENT_BYTES, 0)) == 0  # CUDA pins nothing twice
    copier = CudaCopier(slots, torch.device("cuda", torch.cuda.current_device()), extent_bytes=EXTENT_BYTES)
    assert copier.is_unpinned == (first_extent == 0)
    bench = Bench(copier, slots)
    source, target = random_cache(8_192), random_cache(8_192)
    for span in ([0, 5], [15, 16, 17], [40, 47]):
        copier.save(bench.layer(source), span, span)
        bench.wait(copier.then_saved)
        assert torch.equal(slots[span, :8_192], source[span, 0, 0].cpu())
        copier.load(bench.layer(target), span, span)
        bench.wait(copier.then_loaded)
        assert torch.equal(source[span].cpu(), target[span].cpu())
    copier.close()
    torch.cuda.cudart().cudaHostUnregister(taken)
    torch.cuda.synchronize()  # Raises if an error is left.
