"""The file arena: equal slots of a file on an SSD, each with a record of its block and a checksum.

Three files share a name: `.layout`; `.records`, 128 mapped bytes for each slot; and `.blocks`, the slots. Zeros in the
record empty a slot before it is written, and the record is written once the bytes are in the file. So the end of this
process leaves whole blocks or none. Each read compares the checksum, which also finds changes by a power loss or the disk.
"""

import contextlib
import mmap
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgpack
import xxhash

from prfaas.cachepool.arena import PAGE_BYTES, punch_hole, shape_of, slot_ranges, whole_pages
from prfaas.cachepool.block_run import BlockIdentity
from prfaas.errors import LayoutError
from prfaas.kv.layout import Layout
from prfaas.types import BlockHash

RECORD_BYTES = 128  # Divides a page, so that no record lies on two pages.
_MAGIC = b"prfaas1\n"
# Magic, group, tokens, payload bytes, hash, parent, before, root, and checksum of the payload.
_RECORD = struct.Struct("<8sIQQ16s16s16s16s16s")
_CHECK = struct.Struct("<Q")


class FileArena:
    """Slots in a file. `write` and `read` may run on any thread, one at a time per slot; the rest runs on one thread."""

    def __init__(self, layout: Layout, num_slots: int, *, directory: Path) -> None:
        """Open the layout's files in `directory`, or make them.

        Raises:
            OSError: the files cannot be made.
        """
        self.layout = layout
        self.pinned = False
        self.num_slots = num_slots
        self.shape = shape_of(layout)
        self.stride_bytes = self.shape.stride_bytes
        self._failed: set[int] = set()
        path = directory / layout.fingerprint.hex()
        _write_whole(path.with_suffix(".layout"), msgpack.packb(layout.to_dict()))
        self._blocks_fd = _open(path.with_suffix(".blocks"))
        try:
            os.ftruncate(self._blocks_fd, num_slots * self.stride_bytes)
            self._records = _map_file(path.with_suffix(".records"), num_slots * RECORD_BYTES)
        except OSError:
            os.close(self._blocks_fd)
            raise

    def bump(self, slots: Iterable[int]) -> None:
        """Empty these slots."""
        emptied = list(slots)
        for first, end in slot_ranges(emptied):
            self._records[first * RECORD_BYTES : end * RECORD_BYTES] = bytes((end - first) * RECORD_BYTES)
        self._failed.difference_update(emptied)

    def give_back(self, slots: Iterable[int]) -> None:
        """Return the disk space of free slots to the file system.

        Raises:
            OSError: the system refuses.
        """
        for first, end in slot_ranges(slots):
            punch_hole(self._blocks_fd, first * self.stride_bytes, (end - first) * self.stride_bytes)

    def write(self, slot: int, memory: memoryview, block: BlockIdentity) -> None:
        """Write the block in a slot of memory to an emptied slot, and return when it is in the file.

        Raises:
            OSError: the disk refuses; the slot stays empty.
        """
        num_bytes = self.layout.groups[block.group].block_bytes
        pages = memory[: whole_pages(num_bytes)]
        num_written = os.pwrite(self._blocks_fd, pages, slot * self.stride_bytes)
        if num_written != pages.nbytes:
            raise OSError(f"{num_written} of {pages.nbytes} bytes were written")
        where = slot * RECORD_BYTES
        checksum = xxhash.xxh3_128_digest(pages[:num_bytes])
        self._records[where : where + RECORD_BYTES] = _pack(block, num_bytes, checksum)

    def read(self, slot: int, into: memoryview) -> bool:
        """Read a block over a slot of memory, and return whether its bytes are the written ones.

        Raises:
            OSError: the disk refuses.
        """
        found = self._record(slot)
        if found is None or found[1] > into.nbytes:
            return False
        _, num_bytes, checksum = found
        pages = into[: whole_pages(num_bytes)]
        num_read = os.preadv(self._blocks_fd, [pages], slot * self.stride_bytes)
        return num_read == pages.nbytes and xxhash.xxh3_128_digest(pages[:num_bytes]) == checksum

    def mark_failed(self, slot: int) -> None:
        """Empty a slot whose block cannot be read, so that nobody finds it now or after a restart."""
        self.bump([slot])
        self._failed.add(slot)

    def is_readable(self, slot: int) -> bool:
        """Return whether no read of the slot's block has failed."""
        return slot not in self._failed

    def blocks(self) -> dict[int, BlockIdentity]:
        """Return the slots with a valid record, and their blocks; of equal or overlapping blocks only the first."""
        found: set[tuple[int, BlockHash]] = set()
        blocks: dict[int, BlockIdentity] = {}
        end = 0  # Of the last block's slots.
        for slot in self._slots_with_records():
            record = None if slot < end else self._record(slot)
            if record is not None and (record[0].group, record[0].block_hash) not in found:
                blocks[slot] = record[0]
                found.add((record[0].group, record[0].block_hash))
                end = slot + self.shape.slots_per_block[record[0].group]
        return blocks

    def _slots_with_records(self) -> Iterator[int]:
        """Yield the slots whose records are not empty."""
        page, record = bytes(PAGE_BYTES), bytes(RECORD_BYTES)
        for start in range(0, self.num_slots * RECORD_BYTES, PAGE_BYTES):
            records = self._records[start : start + PAGE_BYTES]
            for where in range(0, len(records), RECORD_BYTES) if records != page else ():
                if records[where : where + RECORD_BYTES] != record:
                    yield (start + where) // RECORD_BYTES

    def _record(self, slot: int) -> tuple[BlockIdentity, int, bytes] | None:
        """Return a slot's block, payload bytes and checksum, or None when the record is empty or torn."""
        record = self._records[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]
        fields = _RECORD.unpack_from(record)
        if fields[0] != _MAGIC or _CHECK.unpack_from(record, _RECORD.size)[0] != _digest(record[: _RECORD.size]):
            return None
        _, group, num_tokens, num_bytes, *hashes, checksum = fields
        if group >= len(self.layout.groups) or num_bytes != self.layout.groups[group].block_bytes:
            return None
        if slot % self.shape.slots_per_block[group]:
            return None
        block_hash, parent, before, root = map(BlockHash, hashes)
        identity = BlockIdentity(group, block_hash, parent, num_tokens, before, root)
        return identity, num_bytes, checksum

    def close(self) -> None:
        """Close the files, which stay. No thread may read or write any more."""
        os.close(self._blocks_fd)
        self._records.close()


def saved_layouts(directory: Path) -> list[Layout]:
    """Return the layouts whose files lie in a directory; other files are ignored."""
    layouts = []
    for path in sorted(directory.glob("*.layout")):
        with contextlib.suppress(OSError, ValueError, LayoutError, msgpack.UnpackException):
            layout = Layout.from_dict(msgpack.unpackb(path.read_bytes()))
            if layout.fingerprint.hex() == path.stem:
                layouts.append(layout)
    return layouts


def _pack(block: BlockIdentity, num_bytes: int, checksum: bytes) -> bytes:
    hashes = (block.block_hash, block.parent, block.before, block.root)
    record = _RECORD.pack(_MAGIC, block.group, block.num_tokens, num_bytes, *hashes, checksum)
    return (record + _CHECK.pack(_digest(record))).ljust(RECORD_BYTES, b"\0")


def _digest(record: bytes) -> int:
    return xxhash.xxh3_64_intdigest(record)


def _open(path: Path) -> int:
    """Open a file for reading and writing, past the page cache if its file system can do that."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        # A file system in memory has no direct I/O.
        return os.open(path, flags, 0o600)


def _map_file(path: Path, num_bytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, num_bytes)
        # A full disk refuses now. A later write to a hole of the mapped file could not be refused.
        os.posix_fallocate(fd, 0, num_bytes)
        return mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears only when it is complete."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
