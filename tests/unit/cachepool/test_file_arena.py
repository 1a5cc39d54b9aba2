"""A file arena gives back what was written, says so after it was closed, and serves nothing that has changed."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.cachepool.block_run import BlockIdentity
from prfaas.cachepool.file_arena import RECORD_BYTES, FileArena, saved_layouts
from prfaas.kv.layout import Layout
from tests.support.pool_layouts import ROOT, hybrid, name

SLOT_BYTES = 5_000  # Not a whole number of pages.


@pytest.fixture
def layout() -> Layout:
    return hybrid(slot_bytes=SLOT_BYTES)


@pytest.fixture
def arena(layout: Layout, tmp_path: Path) -> Iterator[FileArena]:
    arena = FileArena(layout, 8, directory=tmp_path)
    yield arena
    arena.close()


def _block(number: int) -> BlockIdentity:
    return BlockIdentity(0, name(number), ROOT, 32 * number, ROOT)


def _content(number: int) -> bytes:
    return bytes([number % 251] * SLOT_BYTES)


def _slot_of_memory(arena: FileArena) -> memoryview:
    return memoryview(mmap.mmap(-1, arena.stride_bytes))


def _write(arena: FileArena, slot: int, number: int) -> None:
    arena.bump([slot])
    memory = _slot_of_memory(arena)
    memory[:SLOT_BYTES] = _content(number)
    arena.write(slot, memory, _block(number))


def _read(arena: FileArena, slot: int) -> bytes | None:
    into = _slot_of_memory(arena)
    return bytes(into[:SLOT_BYTES]) if arena.read(slot, into) else None


def _blocks_file(arena: FileArena, tmp_path: Path) -> Path:
    return tmp_path / f"{arena.layout.fingerprint.hex()}.blocks"


def test_a_block_is_read_as_it_was_written(arena: FileArena) -> None:
    _write(arena, 3, 7)
    assert _read(arena, 3) == _content(7)
    assert arena.blocks() == {3: _block(7)}


def test_reopened_files_still_hold_their_blocks(layout: Layout, tmp_path: Path) -> None:
    first = FileArena(layout, 8, directory=tmp_path)
    _write(first, 1, 10)
    _write(first, 6, 11)
    first.close()
    assert saved_layouts(tmp_path) == [layout]
    second = FileArena(layout, 8, directory=tmp_path)
    assert second.blocks() == {1: _block(10), 6: _block(11)}
    assert _read(second, 6) == _content(11)
    second.close()


def test_bump_empties_exactly_the_given_slots(arena: FileArena) -> None:
    for slot in range(7):
        _write(arena, slot, slot)
    arena.bump(iter([5, 2, 6, 3]))
    assert arena.blocks().keys() == {0, 1, 4}


@pytest.mark.parametrize("position", [0, 2_500, SLOT_BYTES - 1])
def test_a_corrupted_block_is_detected_and_never_offered_again(arena: FileArena, tmp_path: Path, position: int) -> None:
    _write(arena, 2, 7)
    with _blocks_file(arena, tmp_path).open("r+b") as file:
        file.seek(2 * arena.stride_bytes + position)
        file.write(b"\xff")
    assert _read(arena, 2) is None
    arena.mark_failed(2)
    assert not arena.is_readable(2)
    assert arena.blocks() == {}
    _write(arena, 2, 8)
    assert arena.is_readable(2)
    assert _read(arena, 2) == _content(8)


@pytest.mark.parametrize("position", range(0, 100, 7))
def test_a_torn_record_is_ignored(arena: FileArena, tmp_path: Path, position: int) -> None:
    _write(arena, 2, 7)
    records = tmp_path / f"{arena.layout.fingerprint.hex()}.records"
    with records.open("r+b") as file:
        file.seek(2 * RECORD_BYTES + position)
        before = file.read(1)
        file.seek(2 * RECORD_BYTES + position)
        file.write(bytes([before[0] ^ 0x55]))
    assert arena.blocks() == {}


def test_a_smaller_arena_drops_the_slots_beyond_its_end(layout: Layout, tmp_path: Path) -> None:
    first = FileArena(layout, 8, directory=tmp_path)
    _write(first, 1, 10)
    _write(first, 6, 11)
    first.close()
    second = FileArena(layout, 4, directory=tmp_path)
    assert second.blocks() == {1: _block(10)}
    second.close()


def test_foreign_files_are_not_read_as_layouts(layout: Layout, tmp_path: Path) -> None:
    FileArena(layout, 1, directory=tmp_path).close()
    (tmp_path / "notes.layout").write_bytes(b"\xc1 not ours")
    os.replace(tmp_path / f"{layout.fingerprint.hex()}.layout", tmp_path / f"{'0' * 32}.layout")
    assert saved_layouts(tmp_path) == []


def test_free_slots_return_their_disk_space(arena: FileArena, tmp_path: Path) -> None:
    for slot in range(4):
        _write(arena, slot, slot)
    before = _blocks_file(arena, tmp_path).stat().st_blocks
    arena.give_back([1, 2])
    assert _blocks_file(arena, tmp_path).stat().st_blocks < before
    assert _read(arena, 3) == _content(3)


def test_records_reserve_their_disk_space_at_once(layout: Layout, tmp_path: Path) -> None:
    arena = FileArena(layout, 1000, directory=tmp_path)
    (records,) = tmp_path.glob("*.records")
    assert records.stat().st_blocks * 512 >= 1000 * RECORD_BYTES
    arena.close()
