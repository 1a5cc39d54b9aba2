"""The receiver restores what the sender cut into chunks, whatever the network does to them."""

import random
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from prfaas.transport.protocol.messages import ObjectSizes
from prfaas.transport.ranges import Area, Ranges, Slab
from prfaas.transport.receiver.assembler import Assembler
from prfaas.transport.sender.chunker import Chunk, Chunker

ID = bytes(16)
KIB = 1 << 10
seeds = st.integers(0, 1000)
sizes_in_kib = st.lists(st.integers(1, 900), min_size=1, max_size=8)


class Network:
    """Network that loses, delays, duplicates and damages chunks. Lost chunks return to the sender."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.held_back: list[Chunk] = []

    def deliver(self, chunker: Chunker, chunk: Chunk) -> Iterator[tuple[Slab, bool]]:
        """Yield the slabs that arrive now, and whether they are intact."""
        fate = self._random.random()
        if fate < 0.15:
            chunker.put_back(chunk)
        elif fate < 0.3:
            self.held_back.append(chunk)
        elif fate < 0.4:
            chunker.put_back(chunk)
            yield chunk.slab, False
        else:
            yield from [(chunk.slab, True)] * self._random.randint(1, 2)
        if self.held_back and self._random.random() < 0.5:
            yield self.held_back.pop(self._random.randrange(len(self.held_back))).slab, True


class Memory:
    """Objects of both ends, between which delivered slabs are copied."""

    def __init__(self, sizes: list[int]) -> None:
        self.source = [random.Random(index).randbytes(size) for index, size in enumerate(sizes)]
        self.target = [bytearray(size) for size in sizes]

    def copy(self, slab: Slab, *, is_intact: bool) -> None:
        for index in range(slab.first, slab.last):
            piece = self.source[index][slab.offset : slab.end]
            self.target[index][slab.offset : slab.end] = piece if is_intact else piece[::-1]


def _ready_in_two_parts(chunker: Chunker, sizes: list[int], held: Ranges, cuts: list[int]) -> None:
    chunker.add(ID, priority=0)
    for index, size in enumerate(sizes):
        cut = cuts[index] % size
        for start, end in ((0, cut), (cut, size)):
            if index not in held and start < end:
                chunker.ready(ID, Slab(index, 1, start, end - start))


def _send(chunker: Chunker, network: Network, assembler: Assembler, memory: Memory) -> None:
    while assembler.missing_bytes:
        chunk = chunker.take()
        if chunk is None:
            chunker.put_back(network.held_back.pop())
            continue
        for slab, is_intact in network.deliver(chunker, chunk):
            if assembler.wants(slab):
                memory.copy(slab, is_intact=is_intact)
                assembler.arrived.add(slab) if is_intact else assembler.reject(slab)


@given(sizes_in_kib, st.sets(st.integers(0, 7)), st.lists(st.integers(0, 1 << 20), min_size=8, max_size=8), seeds)
def test_every_byte_arrives_under_loss_duplication_reordering_and_damage(
    kib: list[int], held_objects: set[int], cuts: list[int], seed: int
) -> None:
    sizes = [size * KIB for size in kib]
    held = Ranges((index, index + 1) for index in held_objects if index < len(sizes))
    memory, chunker = Memory(sizes), Chunker(num_connections=2)
    _ready_in_two_parts(chunker, sizes, held, cuts)
    _send(chunker, Network(seed), Assembler(ObjectSizes.of(sizes), held), memory)
    for index in range(len(sizes)):
        assert (bytes(memory.target[index]) == memory.source[index]) == (index not in held)


slabs = st.builds(Slab, st.integers(0, 50), st.integers(1, 700), st.integers(0, 5000), st.integers(1, 3 << 20))


@given(st.lists(slabs, min_size=1, max_size=6), st.integers(1, 16))
def test_chunks_are_exactly_the_ready_bytes_and_fit_into_frames(ready: list[Slab], num_connections: int) -> None:
    chunker = Chunker(num_connections)
    chunker.add(ID, priority=0)
    area, taken = Area(), Area()
    for slab in ready:
        fresh = list(area.missing(slab))
        area.add(slab)
        for part in fresh:
            chunker.ready(ID, part)
    assert chunker.queued_bytes == area.num_bytes
    while (chunk := chunker.take()) is not None:
        assert 0 < chunk.slab.num_bytes <= 1 << 20 and chunk.slab.num_objects <= 512
        assert taken.add(chunk.slab) == chunk.slab.num_bytes
    assert chunker.queued_bytes == 0 and taken.num_bytes == area.num_bytes
    assert all(area.covers(slab) for slab in taken.slabs())
