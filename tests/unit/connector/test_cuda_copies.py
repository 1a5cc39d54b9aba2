"""Copies to and from a GPU, which is pretended: right bytes, few calls, and none that can wait in the model's thread."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from prfaas.cachepool.arena import PAGE_BYTES  # noqa: E402
from prfaas.connector.worker.copy_cuda import CudaCopier, Extents  # noqa: E402
from prfaas.connector.worker.copy_host import BlockPairs, LayerBlocks, LayerCopy  # noqa: E402
from prfaas.kv.parts import LayerSlice  # noqa: E402
from tests.support.counting_device import CountingDevice  # noqa: E402
from tests.support.waiting import PATIENCE_SECONDS, wait_until  # noqa: E402

NUM_LAYERS, NUM_BLOCKS, NUM_SLOTS, BLOCK_BYTES = 64, 32, 48, 64
SLOT_BYTES = NUM_LAYERS * BLOCK_BYTES
GIB = 1 << 30


class Engine:
    """Layers of one group, and an arena of as many bytes as all of them take."""

    def __init__(self, device: CountingDevice, *, is_overwritten: bool = False) -> None:
        self.device = device
        self.slots = torch.zeros(NUM_SLOTS, SLOT_BYTES, dtype=torch.uint8)
        self.layers = [
            LayerBlocks(
                0,
                number,
                LayerSlice(str(number), number * BLOCK_BYTES, BLOCK_BYTES, "uint8", "byte"),
                torch.randint(1, 255, (NUM_BLOCKS, BLOCK_BYTES + 8), dtype=torch.uint8)[:, :BLOCK_BYTES],
                is_overwritten,
            )
            for number in range(NUM_LAYERS)
        ]
        self.copier = CudaCopier([self.slots], device)

    def copies(self, pairs: BlockPairs) -> list[LayerCopy]:
        return [(layer, pairs) for layer in self.layers]

    def blocks(self, block_ids: Sequence[int]) -> Any:
        return torch.cat([layer.pages[list(block_ids)] for layer in self.layers], dim=1)

    def save(self, pairs: BlockPairs, *, by_layer: bool = False) -> None:
        self._wait(self.copier.save, pairs, by_layer=by_layer)

    def load(self, pairs: BlockPairs) -> None:
        self._wait(self.copier.load, pairs, by_layer=False)

    def _wait(self, copy: object, pairs: BlockPairs, *, by_layer: bool) -> None:
        done = threading.Event()
        copies = self.copies(pairs)
        for batch in [[item] for item in copies] if by_layer else [copies]:
            copy(batch, done.set if batch[-1] is copies[-1] else lambda: None)  # type: ignore[operator]
        assert done.wait(PATIENCE_SECONDS)


@contextmanager
def engine_on(device: CountingDevice, *, is_overwritten: bool = False) -> Iterator[Engine]:
    engine = Engine(device, is_overwritten=is_overwritten)
    yield engine
    device.gate.set()
    engine.copier.close()
    assert device.pinned == []


@pytest.mark.parametrize("num_requests", [1, 16])
def test_a_step_of_64_layers_takes_one_launch_and_four_events_in_each_direction(num_requests: int) -> None:
    pairs = BlockPairs()
    for request in range(num_requests):
        pairs.add([2 * request, 2 * request + 1], [31 + request, 2 * request + 1 - request])
    with engine_on(CountingDevice()) as engine:
        engine.save(pairs)
        assert torch.equal(engine.slots[pairs.slots], engine.blocks(pairs.block_ids))
        assert engine.device.calls == {"launch": 1, "event": 4, "wake-up": 1}
        engine.slots.random_(1, 255)
        engine.device.calls.clear()
        engine.load(pairs)
        assert torch.equal(engine.slots[pairs.slots], engine.blocks(pairs.block_ids))
        assert engine.device.calls == {"launch": 1, "event": 4, "wake-up": 1}


def test_a_streamed_layer_takes_one_launch() -> None:
    pairs = BlockPairs([3, 4, 9], [0, 1, 40])
    with engine_on(CountingDevice()) as engine:
        engine.save(pairs, by_layer=True)
        assert torch.equal(engine.slots[pairs.slots], engine.blocks(pairs.block_ids))
        assert engine.device.calls == {"launch": NUM_LAYERS, "event": 4 * NUM_LAYERS, "wake-up": NUM_LAYERS}


def test_no_call_that_can_wait_is_made_in_the_models_thread() -> None:
    with engine_on(CountingDevice()) as engine:
        for _ in range(3):
            engine.save(BlockPairs([1, 2], [5, 6]), by_layer=True)
            engine.load(BlockPairs([1, 2], [5, 6]))
        assert set(engine.device.waiting_threads) == {"prfaas-saves", "prfaas-loads"}


def test_the_models_thread_goes_on_while_copies_are_stuck() -> None:
    with engine_on(CountingDevice()) as engine:
        engine.device.gate.clear()
        done: list[str] = []
        for word in ("first", "second"):
            engine.copier.save(engine.copies(BlockPairs([1], [5])), partial(done.append, word))
        engine.copier.save([], partial(done.append, "nothing to copy"))
        assert done == []
        engine.device.gate.set()
        wait_until(lambda: len(done) == 3, what="the copies")
        assert done == ["first", "second", "nothing to copy"]


def test_a_state_that_the_next_step_overwrites_is_saved_as_it_was() -> None:
    with engine_on(CountingDevice(), is_overwritten=True) as engine:
        engine.device.gate.clear()
        pairs, done = BlockPairs([7], [3]), threading.Event()
        right = engine.blocks([7])
        engine.copier.save(engine.copies(pairs), done.set)
        for layer in engine.layers:
            layer.pages[7] = 0
        engine.device.gate.set()
        assert done.wait(PATIENCE_SECONDS)
        assert torch.equal(engine.slots[[3]], right)


def test_a_state_is_kept_until_its_copy_has_ended() -> None:
    """The device gives memory to the model once nothing refers to it, also while a copy on another stream reads it."""
    with engine_on(CountingDevice(), is_overwritten=True) as engine:
        engine.device.gate.clear()
        done = threading.Event()
        for finish in (lambda: None, done.set):
            engine.copier.save(engine.copies(BlockPairs([7], [3])), finish)
        engine.device.gate.set()
        assert done.wait(PATIENCE_SECONDS)
        assert engine.device.kept == [2 * NUM_LAYERS, NUM_LAYERS]
        wait_until(lambda: not engine.device.snapshots, what="the release of the states")


def test_a_failed_copy_stops_the_engine_with_its_next_one() -> None:
    with engine_on(CountingDevice(failure=RuntimeError("illegal address"))) as engine:
        copies = engine.copies(BlockPairs([1], [5]))
        engine.copier.save(copies, lambda: None)

        def has_stopped() -> bool:
            try:
                engine.copier.save(copies, lambda: None)
            except RuntimeError:
                return True
            return False

        wait_until(has_stopped, what="the failure")


# Pinned memory


@given(
    num_rows=st.integers(1, 300),
    slot_bytes=st.integers(1, 300).map(lambda lines: 64 * lines),
    slots_per_row=st.integers(1, 4),
    extent_bytes=st.integers(1, 1 << 17),
    data=st.data(),
)
def test_extents_are_whole_pages_and_rows_and_only_those_in_use_are_pinned(
    num_rows: int, slot_bytes: int, slots_per_row: int, extent_bytes: int, data: st.DataObject
) -> None:
    pinned: list[tuple[int, int]] = []

    def pin(offset: int, num_bytes: int) -> bool:
        pinned.append((offset, offset + num_bytes))
        return True

    used = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=5))
    extents = Extents(
        num_slots=num_rows * slots_per_row,
        slot_bytes=slot_bytes,
        pin=pin,
        slots_per_row=slots_per_row,
        extent_bytes=extent_bytes,
    )
    row_bytes = slots_per_row * slot_bytes
    for row in used:
        extents.use([row * slots_per_row])
        assert any(start <= row * row_bytes and (row + 1) * row_bytes <= end for start, end in pinned)
    assert all(any(start <= row * row_bytes < end for row in used) for start, end in pinned)
    assert all(start % PAGE_BYTES == start % row_bytes == 0 for start, _ in pinned)
    assert extents.pinned() == sorted({start for start, _ in pinned}) and len(set(pinned)) == len(pinned)


def test_a_slot_at_250_gib_pins_as_much_as_the_first() -> None:
    pinned: list[tuple[int, int]] = []

    def pin(offset: int, num_bytes: int) -> bool:
        pinned.append((offset, num_bytes))
        return True

    slot_bytes = 1 << 20
    extents = Extents(num_slots=300 * GIB // slot_bytes, slot_bytes=slot_bytes, pin=pin)
    started = time.thread_time()
    extents.use([250 * GIB // slot_bytes])
    assert time.thread_time() - started < 0.1
    extents.use([0])
    assert pinned == [(250 * GIB, 64 << 20), (0, 64 << 20)]


def test_memory_that_cannot_be_pinned_is_copied_all_the_same() -> None:
    with engine_on(CountingDevice(pinnable_bytes=0)) as engine:
        pairs = BlockPairs([1, 2], [5, 6])
        engine.save(pairs)
        assert torch.equal(engine.slots[pairs.slots], engine.blocks(pairs.block_ids))
