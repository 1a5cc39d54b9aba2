"""The arena is sealed, sparse, and says by generations which slots were given to other blocks."""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.cachepool.arena import PAGE_BYTES, Arena
from tests.support.pool_layouts import hybrid

_POLICIES = Path("/proc/self/numa_maps")


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(hybrid(slot_bytes=PAGE_BYTES + 1), 8)
    yield arena
    arena.close()


def _used_bytes(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_slots_begin_on_pages_after_the_generations(arena: Arena) -> None:
    assert arena.stride_bytes == 2 * PAGE_BYTES
    assert arena.header_bytes == PAGE_BYTES
    assert os.fstat(arena.fd).st_size == PAGE_BYTES + 8 * arena.stride_bytes


def test_a_sealed_arena_cannot_be_resized(arena: Arena) -> None:
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_another_mapping_sees_slots_and_generations(arena: Arena) -> None:
    arena.slot_view(3)[:5] = b"block"
    arena.bump([3, 5])
    arena.bump([3])
    with mmap.mmap(arena.fd, os.fstat(arena.fd).st_size) as mapping:
        start = arena.header_bytes + 3 * arena.stride_bytes
        assert mapping[start : start + 5] == b"block"
        assert [int.from_bytes(mapping[slot * 8 : slot * 8 + 8], "little") for slot in (3, 4, 5)] == [2, 0, 1]
    assert [arena.generation(slot) for slot in (3, 4, 5)] == [2, 0, 1]


def test_an_unused_arena_of_64_gib_takes_no_memory() -> None:
    arena = Arena(hybrid(slot_bytes=64 << 10), 1 << 20)
    try:
        assert _used_bytes(arena) == 0
        arena.bump([0, (1 << 20) - 1])
        assert _used_bytes(arena) <= 2 * PAGE_BYTES
    finally:
        arena.close()


def test_returned_slots_lose_their_memory_and_neighbours_keep_it(arena: Arena) -> None:
    for slot in range(8):
        arena.slot_view(slot)[:] = bytes([slot + 1]) * arena.stride_bytes
    before = _used_bytes(arena)
    arena.give_back([4, 2, 3])
    assert before - _used_bytes(arena) >= 2 * PAGE_BYTES
    for slot in (0, 1, 5, 6, 7):
        assert bytes(arena.slot_view(slot)) == bytes([slot + 1]) * arena.stride_bytes
    arena.slot_view(3)[:5] = b"again"
    assert bytes(arena.slot_view(3)[:5]) == b"again"


@pytest.mark.skipif(not _POLICIES.exists(), reason="needs a kernel with NUMA")
def test_every_mapping_prefers_the_node(arena: Arena) -> None:
    with mmap.mmap(arena.fd, os.fstat(arena.fd).st_size) as mapping:
        try:
            arena.prefer_node(0)
        except PermissionError:
            pytest.skip("the system allows no policy, as in a container")
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        assert f"\n{start:x} prefer:0 file=" in _POLICIES.read_text()


@pytest.mark.parametrize("node", [-1, 1000, 1 << 40])
def test_a_node_that_does_not_exist_is_refused_with_the_cause(arena: Arena, node: int) -> None:
    with pytest.raises(OSError) as failure:
        arena.prefer_node(node)
    assert failure.value.errno in (errno.EINVAL, errno.EPERM, errno.ENOSYS) and failure.value.strerror


def test_a_pinned_arena_never_returns_memory(arena: Arena) -> None:
    arena.pinned = True
    with pytest.raises(AssertionError):
        arena.give_back([1])
