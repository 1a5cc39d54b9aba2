"""The SSD tier: prefix blocks of the memory pool, written behind to files and read back on demand."""

import fcntl
import itertools
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from prfaas import logs, metrics
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.block_run import BlockIdentity
from prfaas.cachepool.file_arena import FileArena, saved_layouts
from prfaas.cachepool.pool import Pool, SlotPool
from prfaas.cachepool.slots import LeaseId
from prfaas.errors import ConfigError
from prfaas.kv.layout import Layout
from prfaas.pool_events import BlocksRemoved, BlocksStored, PoolChange
from prfaas.types import BlockHash

BURST_SECONDS = 0.25
NUM_THREADS = 8  # Blocks that are read, and blocks that are written, at a time.
MAX_WAITING = 1 << 20  # Blocks that wait to be written. The oldest are dropped first: they are evicted next.
_IN_FLIGHT_RATIO = 0.05  # Share of the budget for slots that are being written.
_log = logs.get("cachepool.ssd")

Post = Callable[..., None]  # Takes a function and its arguments, and calls it on the event loop.
BlockKey = tuple[bytes, int, BlockHash]  # Layout fingerprint, group and hash.


class DiskBudget:
    """Rate limit for blocks, with bursts of a quarter second. A block may overdraw it; the next block then waits."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._balance = bytes_per_second * BURST_SECONDS
        self._updated_at = 0.0

    def has_room(self, now: float) -> bool:
        """Return whether the next block may go now."""
        earned = (now - self._updated_at) * self._bytes_per_second
        self._balance = min(self._balance + earned, self._bytes_per_second * BURST_SECONDS)
        self._updated_at = now
        return not self._bytes_per_second or self._balance > 0

    def spend(self, num_bytes: int) -> None:
        self._balance -= num_bytes


@dataclass(frozen=True)
class _WriteJob:
    arena: FileArena
    slot: int
    block: BlockIdentity
    source_lease: LeaseId  # In the memory pool.
    target_lease: LeaseId


@dataclass(frozen=True, eq=False)
class _ReadJob:
    arena: FileArena
    slot: int
    block: BlockIdentity
    into: memoryview
    lease: LeaseId
    done: Callable[[bool], None]


class SsdTier:
    """One directory of file arenas. The caller runs `pump` regularly; while there is work, jobs also run it."""

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        memory: Pool,
        *,
        write_bytes_per_second: float = 0.0,
        post: Post,
        on_change: Callable[[PoolChange], None],
    ) -> None:
        """Open the directory. A rate of 0 means no limit.

        Raises:
            ConfigError: the directory cannot be used, another agent uses it, or its disk is smaller than the budget.
        """
        _check_disk(directory, budget_bytes)
        self._lock = _lock(directory)
        self._directory = directory
        self._memory = memory
        self._post = post
        self._on_change = on_change
        self.pool: SlotPool[FileArena] = SlotPool(
            budget_bytes,
            transfer_ratio=_IN_FLIGHT_RATIO,
            on_change=on_change,
            tier="ssd",
            make_arena=lambda layout, num_slots: FileArena(layout, num_slots, directory=directory),
        )
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prfaas-ssd")
        self._write_budget = DiskBudget(write_bytes_per_second)
        self._to_write: deque[BlockKey] = deque(maxlen=MAX_WAITING)
        self._to_read: deque[_ReadJob] = deque()
        self._writing: set[_WriteJob] = set()
        self._reading: set[_ReadJob] = set()
        self._awaited: list[tuple[set[_WriteJob | _ReadJob], Callable[[], None]]] = []  # Jobs, and a call after them.
        self._is_closed = False

    def restore(self, on_layout: Callable[[Layout], None]) -> None:
        """Publish the blocks of an earlier life; `on_layout` gets each layout first."""
        for layout in saved_layouts(self._directory):
            try:
                arena = self.pool.arena(layout)
            except OSError as error:
                _log.warning("ssd.restore_failed", model=layout.model, error=str(error))
                continue
            on_layout(layout)
            self.pool.restore(arena, arena.blocks())
        _log.info("ssd.restored", **self.pool.stats().slots_by_kind)

    # Queries

    def holds(self, layout: Layout, group: int, hashes: Iterable[BlockHash]) -> list[bool]:
        """Return for each block whether it can be read."""
        arena = self.pool.arena_of(layout.fingerprint)
        if arena is None:
            return [False for _ in hashes]
        found = self.pool.find_all(arena, group, hashes)
        return [slot is not None and arena.is_readable(slot) for slot in found]

    def is_idle(self) -> bool:
        """Return whether nothing waits to be written or read."""
        return not (self._to_write or self._to_read or self._writing or self._reading)

    # Removal

    def forget(self, model: str, then: Callable[[], None]) -> int:
        """Do `Pool.forget` for this tier, after the memory pool's: blocks in memory would be written again.

        Pending reads of the model report failure. `then` is called once nothing of the model is being written or read.
        Files of an agent that is killed before then may still hold blocks of the model.
        """
        num_bytes = self.pool.forget(model)
        self._give_up(lambda job: job.arena.layout.model == model)
        if self._have_ended({job for job in self._jobs() if job.arena.layout.model == model}, then):
            then()
        return num_bytes

    def _jobs(self) -> set[_WriteJob | _ReadJob]:
        return {*self._writing, *self._reading}

    def _have_ended(self, jobs: set[_WriteJob | _ReadJob], then: Callable[[], None]) -> bool:
        """Return whether there are no jobs; if there are, call `then` once they have ended."""
        if jobs:
            self._awaited.append((jobs, then))
        return not jobs

    def _call_waiters(self) -> None:
        waiting, self._awaited = self._awaited, []
        for awaited, then in waiting:
            if self._have_ended(awaited & self._jobs(), then):
                then()

    # Writing behind

    def offer(self, change: PoolChange) -> None:
        """Queue the blocks that the memory pool has stored."""
        if isinstance(change, BlocksStored):
            self._to_write.extend((change.layout, change.group, block_hash) for block_hash in change.hashes)

    def _source(self, key: BlockKey) -> tuple[Arena, int] | None:
        """Return the arena and slot of a block in memory."""
        fingerprint, group, block_hash = key
        arena = self._memory.arena_of(fingerprint)
        slot = None if arena is None else self._memory.find(arena, group, block_hash)
        return None if arena is None or slot is None else (arena, slot)

    def pump(self) -> None:
        """Begin as many reads, then writes, as the threads and the write budget allow."""
        while self._to_read and len(self._reading) < NUM_THREADS:
            job = self._to_read.popleft()
            self._reading.add(job)
            self._threads.submit(self._read, job)
        now = time.monotonic()
        while self._to_write and len(self._writing) < NUM_THREADS and self._write_budget.has_room(now):
            if not self._begin_write(self._to_write[0]):
                return
            self._to_write.popleft()

    def _begin_write(self, key: BlockKey) -> bool:
        """Begin to write a block if that is needed; return False when there is no room for it now."""
        found = self._source(key)
        if found is None:
            return True
        try:
            arena = self.pool.arena(found[0].layout)
            if self.pool.find(arena, key[1], key[2]) is not None:
                return True
            # Without other blocks in flight, there is never room for this block.
            return self._write_from(*found, arena) or not self._writing
        except OSError as error:
            # A disk that refuses costs blocks, not the agent.
            self._note_write_failure(str(error))
            return True

    def _note_write_failure(self, error: str) -> None:
        metrics.SSD_FAILURES.labels(reason="write").inc()
        _log.warning("ssd.write_failed", error=error)

    def _write_from(self, source: Arena, source_slot: int, arena: FileArena) -> bool:
        block, lease = self._memory.identity(source, source_slot), self.pool.open_lease()
        try:
            taken = self.pool.allocate(arena, block.group, 1, lease)
        except OSError:
            self.pool.end_lease(lease)
            raise
        if taken is None:
            self.pool.end_lease(lease)
            return False
        reader = self._memory.open_lease()
        self._memory.pin(source, [source_slot], reader, is_use=False)
        self._write_budget.spend(_num_bytes(arena, block))
        job = _WriteJob(arena, taken[0], block, reader, lease)
        self._writing.add(job)
        self._threads.submit(self._write, job, source.slot_view(source_slot, block.group))
        return True

    def _write(self, job: _WriteJob, memory: memoryview) -> None:
        """Write a block, on a thread."""
        error = ""
        try:
            job.arena.write(job.slot, memory, job.block)
            metrics.SSD_BYTES.labels(direction="write").inc(_num_bytes(job.arena, job.block))
        except OSError as failure:
            error = str(failure)
        self._post(self._end_write, job, error)

    def _end_write(self, job: _WriteJob, error: str) -> None:
        if self._is_closed:
            return
        self._writing.discard(job)
        if error:
            self._note_write_failure(error)
        else:
            self.pool.publish(job.arena, job.slot, job.block)
        self.pool.end_lease(job.target_lease)
        self._memory.end_lease(job.source_lease)
        self._call_waiters()
        self.pump()

    # Reading back

    def read(self, layout: Layout, block: BlockIdentity, into: memoryview, done: Callable[[bool], None]) -> bool:
        """Queue a read over a slot of memory, and return False when the block is not here.

        The slot must stay in use until `done` is called with whether the block is intact.
        """
        arena = self.pool.arena_of(layout.fingerprint)
        slot = None if arena is None else self.pool.find(arena, block.group, block.block_hash)
        if arena is None or slot is None or not arena.is_readable(slot):
            return False
        lease = self.pool.open_lease()
        self.pool.pin(arena, [slot], lease)
        self._to_read.append(_ReadJob(arena, slot, block, into, lease, done))
        return True

    def give_up(self, done: Callable[[bool], None]) -> None:
        """Drop the queued reads for which `done` waits."""
        self._give_up(lambda job: job.done == done)

    def _give_up(self, is_meant: Callable[[_ReadJob], bool]) -> None:
        unread = list(filter(is_meant, self._to_read))
        self._to_read = deque(itertools.filterfalse(is_meant, self._to_read))
        for job in unread:
            self.pool.end_lease(job.lease)
            job.done(False)

    def _read(self, job: _ReadJob) -> None:
        """Read a block, on a thread."""
        try:
            is_whole = job.arena.read(job.slot, job.into)
        except OSError:
            is_whole = False
        self._post(self._end_read, job, is_whole)

    def _end_read(self, job: _ReadJob, is_whole: bool) -> None:
        if self._is_closed:
            return
        self._reading.discard(job)
        group, block_hash = job.block.group, job.block.block_hash
        # The block may have been forgotten meanwhile.
        is_known = self.pool.find(job.arena, group, block_hash) == job.slot
        if is_whole:
            metrics.SSD_BYTES.labels(direction="read").inc(_num_bytes(job.arena, job.block))
        elif is_known and job.arena.is_readable(job.slot):
            metrics.SSD_FAILURES.labels(reason="read").inc()
            job.arena.mark_failed(job.slot)
            self._on_change(BlocksRemoved(job.arena.layout.fingerprint, group, (block_hash,), "ssd"))
        self.pool.end_lease(job.lease)
        job.done(is_whole and is_known)
        self._call_waiters()
        self.pump()

    def close(self) -> None:
        """Wait for the threads. Queued blocks are not written any more."""
        self._is_closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.pool.close()
        os.close(self._lock)


def disk_bytes(directory: Path) -> int:
    """Return the size of the disk on which a directory is, or would be made."""
    path = directory.absolute()
    return shutil.disk_usage(next(parent for parent in (path, *path.parents) if parent.exists())).total


def _check_disk(directory: Path, budget_bytes: int) -> None:
    size = disk_bytes(directory)
    if budget_bytes > size:
        wanted, found = f"{budget_bytes >> 20}MiB", f"{size >> 20}MiB"
        raise ConfigError(f"ssd_bytes: {wanted}, and the disk of {directory} has {found}; write less")


def _lock(directory: Path) -> int:
    """Make the directory and lock it for this process while the returned descriptor is open.

    Raises:
        ConfigError: the directory cannot be made or written to, or another agent has it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"ssd_directory: {directory}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(f"ssd_directory: {directory}: another agent uses it") from error
    return descriptor


def _num_bytes(arena: FileArena, block: BlockIdentity) -> int:
    return arena.layout.groups[block.group].block_bytes
