"""A budget of bytes per second that may be spent in bursts of a quarter second (pure)."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from prfaas import logs, metrics
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.block_run import BlockIdentity
from prfaas.cachepool.file_arena import AlignedBuffer, FileArena, saved_layouts
from prfaas.cachepool.pool import Pool, SlotPool
from prfaas.cachepool.removal import RunCut
from prfaas.cachepool.slots import LeaseId, SlotTable
from prfaas.errors import ConfigError
from prfaas.kv.layout import Layout
from prfaas.pool_events import BlocksRemoved, BlocksStored, PoolChange
from prfaas.types import BlockHash

BURST_SECONDS = 0.25


class DiskBudget:
    """Says when the next piece may go. A piece may overdraw the budget; the next one then waits for it."""

    def __init__(self, bytes_per_second: float) -> None:
        """0 bytes per second: no limit."""
        self._bytes_per_second = bytes_per_second
        self._balance = bytes_per_second * BURST_SECONDS
        self._at = 0.0

    def has_room(self, now: float) -> bool:
        """Whether the next piece may go now."""
        earned = (now - self._at) * self._bytes_per_second
        self._balance = min(self._balance + earned, self._bytes_per_second * BURST_SECONDS)
        self._at = now
        return not self._bytes_per_second or self._balance > 0

    def spend(self, num_bytes: int) -> None:
        """A piece goes."""
        self._balance -= num_bytes


MAX_WAITING = 1 << 20  # blocks that wait to be written; the oldest are given up first, they are the next to be evicted
_IN_FLIGHT_RATIO = 0.05  # of the budget: slots that are being written
_log = logs.get("cachepool.ssd")

Post = Callable[..., None]  # (function, *arguments): have it run on the loop
Key = tuple[bytes, int, BlockHash]  # layout, group, hash


@dataclass(frozen=True)
class SsdSettings:
    """Rates are in bytes per second, 0 for what the disk allows."""

    directory: Path
    budget_bytes: int
    num_threads: int = 8
    write_bytes_per_second: float = 0.0
    read_bytes_per_second: float = 0.0


@dataclass(frozen=True)
class _Writing:
    arena: FileArena
    slot: int
    block: BlockIdentity
    source: LeaseId  # of the memory pool
    target: LeaseId


@dataclass(frozen=True, eq=False)
class _Reading:
    arena: FileArena
    slot: int
    block: BlockIdentity
    into: memoryview
    lease: LeaseId
    done: Callable[[bool], None]


class SsdTier:
    """One directory of file arenas. `pump` is called now and then, and continues by itself while there is work."""

    def __init__(
        self, settings: SsdSettings, memory: Pool, *, post: Post, on_change: Callable[[PoolChange], None]
    ) -> None:
        """Raises:
        ConfigError: the directory cannot be used, another agent uses it, or its disk is smaller than the budget.
        """
        _check_disk(settings)
        self._lock = _lock(settings.directory)
        self._settings = settings
        self._memory = memory
        self._post = post
        self._on_change = on_change
        self._pool: SlotPool[FileArena] = SlotPool(
            settings.budget_bytes,
            transfer_ratio=_IN_FLIGHT_RATIO,
            on_change=self._on_own_change,
            tier="ssd",
            make_arena=lambda layout, num_slots: FileArena(layout, num_slots, directory=settings.directory),
        )
        self._threads = ThreadPoolExecutor(settings.num_threads, thread_name_prefix="prfaas-ssd")
        self._buffers = threading.local()
        self._write_budget = DiskBudget(settings.write_bytes_per_second)
        self._read_budget = DiskBudget(settings.read_bytes_per_second)
        self._to_write: deque[Key] = deque(maxlen=MAX_WAITING)
        self._to_read: deque[_Reading] = deque()
        self._too_wide: set[bytes] = set()  # layouts whose blocks the budget does not hold
        self._writing: set[_Writing] = set()
        self._reading: set[_Reading] = set()
        self._awaited: list[tuple[set[_Writing | _Reading], Callable[[], None]]] = []  # and what is called after them
        self._is_closed = False

    def restore(self, on_layout: Callable[[Layout], None]) -> None:
        """Take up what an earlier life left, and announce it; `on_layout` hears of each layout first."""
        for layout in saved_layouts(self._settings.directory):
            try:
                arena = self._pool.arena(layout)
            except OSError as error:
                _log.warning("ssd.not_restored", model=layout.model, error=str(error))
                continue
            on_layout(layout)
            self._pool.restore(arena, arena.blocks())
        _log.info("ssd.restored", **self._pool.stats().slots_by_kind)

    # What is there

    def holds(self, layout: Layout, group: int, hashes: Iterable[BlockHash]) -> list[bool]:
        """Of each block whether it can be read."""
        arena = self._arena(layout)
        if arena is None:
            return [False for _ in hashes]
        found = self._pool.find_all(arena, group, hashes)
        return [slot is not None and arena.is_readable(slot) for slot in found]

    def identity(self, layout: Layout, group: int, block_hash: BlockHash) -> BlockIdentity | None:
        """What a block is, when it is here."""
        arena = self._arena(layout)
        slot = None if arena is None else self._pool.find(arena, group, block_hash)
        return None if arena is None or slot is None else self._pool.identity(arena, slot)

    def states_after(self, layout: Layout, group: int, unit: BlockHash) -> dict[BlockHash, int]:
        """As `Pool.states_after`."""
        arena = self._arena(layout)
        return {} if arena is None else self._pool.states_after(arena, group, unit)

    @property
    def tables(self) -> list[SlotTable]:
        """As `Pool.tables`."""
        return self._pool.tables

    def cut(self, cuts: Iterable[RunCut]) -> int:
        """As `Pool.cut`."""
        return self._pool.cut(cuts)

    def write_none_of(self, hashes: Set[BlockHash], then: Callable[[], None]) -> bool:
        """Nothing of these blocks waits to be written any more; whether none is being written either.

        If one is, `then` is called once that has ended.
        """
        self._to_write = deque((key for key in self._to_write if key[2] not in hashes), maxlen=MAX_WAITING)
        return self._have_ended({its for its in self._writing if its.block.block_hash in hashes}, then)

    def _have_ended(self, under_way: set[_Writing | _Reading], then: Callable[[], None]) -> bool:
        """Whether all of this has; if not, `then` is called once it has."""
        if under_way:
            self._awaited.append((under_way, then))
        return not under_way

    def forget(self, model: str, then: Callable[[], None]) -> int:
        """As `Pool.forget`, of which memory comes first: what it holds is written again when it leaves the SSD.

        `then` is called once nothing of the model is being written or read any more, which an agent that is killed before
        would leave. Who waits for a read of it hears that it is not there.
        """
        num_bytes = self._pool.forget(model)
        self._give_up(lambda its: its.arena.layout.model == model)
        if self._have_ended({its for its in self._under_way() if its.arena.layout.model == model}, then):
            then()
        return num_bytes

    def _under_way(self) -> set[_Writing | _Reading]:
        return {*self._writing, *self._reading}

    def _arena(self, layout: Layout) -> FileArena | None:
        return self._pool.arena_of(layout.fingerprint)

    def slots_by_kind(self) -> dict[str, int]:
        return self._pool.stats().slots_by_kind

    def is_idle(self) -> bool:
        """Whether nothing waits to be written or read."""
        return not (self._to_write or self._to_read or self._writing or self._reading)

    # Writing behind

    def offer(self, change: PoolChange) -> None:
        """The memory pool has changed: what it stored is to be written when there is time."""
        if isinstance(change, BlocksStored):
            self._to_write.extend((change.layout, change.group, block_hash) for block_hash in change.hashes)

    def _on_own_change(self, change: PoolChange) -> None:
        """What leaves the SSD while memory still holds it is written again, or it would be nowhere once memory evicts it.

        Not where the SSD is no larger than memory: what is written would drive out what is to be written next.
        """
        self._on_change(change)
        if isinstance(change, BlocksRemoved) and self._settings.budget_bytes > self._memory.budget_bytes:
            keys = ((change.layout, change.group, block_hash) for block_hash in change.hashes)
            self._to_write.extend(key for key in keys if self._source(key) is not None)

    def _source(self, key: Key) -> tuple[Arena, int] | None:
        """Where in memory a block is."""
        fingerprint, group, block_hash = key
        arena = self._memory.arena_of(fingerprint)
        slot = None if arena is None else self._memory.find(arena, group, block_hash)
        return None if arena is None or slot is None else (arena, slot)

    def pump(self) -> None:
        """Begin as many reads, then writes, as the budgets and the threads allow."""
        now = time.monotonic()
        while self._to_read and len(self._reading) < self._settings.num_threads and self._read_budget.has_room(now):
            self._begin_read(self._to_read.popleft())
        while self._to_write and len(self._writing) < self._settings.num_threads and self._write_budget.has_room(now):
            if not self._begin_write(self._to_write[0]):
                return
            self._to_write.popleft()

    def _begin_write(self, key: Key) -> bool:
        """Begin to write a block, if it needs to be; False when there is no room for it now."""
        found = self._source(key)
        if found is None:
            return True
        try:
            arena = self._arena_for(found[0].layout)
            if arena is None or self._pool.find(arena, key[1], key[2]) is not None:
                return True
            return self._write_from(*found, arena)
        except OSError as error:  # a disk that refuses costs blocks, not the agent
            self._write_failed(str(error))
            return True

    def _arena_for(self, layout: Layout) -> FileArena | None:
        """Where blocks of this layout are written; None when not even one at a time has room in the budget."""
        arena = self._pool.arena(layout)
        in_flight_bytes = int(self._settings.budget_bytes * _IN_FLIGHT_RATIO)
        if arena.stride_bytes <= in_flight_bytes:
            return arena
        if layout.fingerprint not in self._too_wide:
            self._too_wide.add(layout.fingerprint)
            sizes = {"block_bytes": arena.stride_bytes, "in_flight_bytes": in_flight_bytes}
            _log.warning("ssd.too_small", model=layout.model, **sizes)
        return None

    def _write_failed(self, error: str) -> None:
        metrics.SSD_FAILURES.labels(reason="write").inc()
        _log.warning("ssd.write_failed", error=error)

    def _write_from(self, source: Arena, source_slot: int, arena: FileArena) -> bool:
        lease = self._pool.open_lease("writer")
        try:
            taken = self._pool.allocate(arena, 1, lease)
        except OSError:
            self._pool.end_lease(lease)
            raise
        if taken is None:
            self._pool.end_lease(lease)
            return False
        block, reader = self._memory.identity(source, source_slot), self._memory.open_lease("ssd")
        self._memory.pin(source, [source_slot], reader, is_use=False)
        self._write_budget.spend(_num_bytes(arena, block))
        its = _Writing(arena, taken[0], block, reader, lease)
        self._writing.add(its)
        self._threads.submit(self._write, its, source.slot_view(source_slot))
        return True

    def _write(self, its: _Writing, memory: memoryview) -> None:
        """On a thread."""
        error = ""
        try:
            its.arena.write(its.slot, memory, its.block, self._buffer(its.arena))
            metrics.SSD_BYTES.labels(direction="write").inc(_num_bytes(its.arena, its.block))
        except OSError as failure:
            error = str(failure)
        self._post(self._written, its, error)

    def _written(self, its: _Writing, error: str) -> None:
        if self._is_closed:
            return
        self._writing.discard(its)
        if error:
            self._write_failed(error)
        else:
            self._pool.publish(its.arena, its.slot, **asdict(its.block))
        self._pool.end_lease(its.target)
        self._memory.end_lease(its.source)
        self._tell_who_waits()
        self.pump()

    def _tell_who_waits(self) -> None:
        waiting, self._awaited = self._awaited, []
        for awaited, then in waiting:
            if self._have_ended(awaited & self._under_way(), then):
                then()

    # Reading back

    def read(self, layout: Layout, block: BlockIdentity, into: memoryview, done: Callable[[bool], None]) -> bool:
        """Read a block over the start of a slot, which stays taken until `done` hears whether it is whole; False when it is
        not here."""
        arena = self._arena(layout)
        slot = None if arena is None else self._pool.find(arena, block.group, block.block_hash)
        if arena is None or slot is None or not arena.is_readable(slot):
            return False
        lease = self._pool.open_lease("reader")
        self._pool.pin(arena, [slot], lease)
        self._to_read.append(_Reading(arena, slot, block, into, lease, done))
        return True

    def give_up(self, done: Callable[[bool], None]) -> None:
        """Nobody needs the blocks any more that `done` waits for: those that are not being read yet are not read."""
        self._give_up(lambda its: its.done == done)

    def _give_up(self, is_meant: Callable[[_Reading], bool]) -> None:
        unread = list(filter(is_meant, self._to_read))
        self._to_read = deque(itertools.filterfalse(is_meant, self._to_read))
        for its in unread:
            self._pool.end_lease(its.lease)
            its.done(False)

    def _begin_read(self, its: _Reading) -> None:
        self._read_budget.spend(_num_bytes(its.arena, its.block))
        self._reading.add(its)
        self._threads.submit(self._read, its)

    def _read(self, its: _Reading) -> None:
        """On a thread."""
        try:
            is_whole = its.arena.read(its.slot, its.into, self._buffer(its.arena))
        except OSError:
            is_whole = False
        self._post(self._was_read, its, is_whole)

    def _was_read(self, its: _Reading, is_whole: bool) -> None:
        if self._is_closed:
            return
        self._reading.discard(its)
        is_known = (
            self._pool.find(its.arena, its.block.group, its.block.block_hash) == its.slot
        )  # else it was forgotten
        if is_whole:
            metrics.SSD_BYTES.labels(direction="read").inc(_num_bytes(its.arena, its.block))
        elif is_known and its.arena.is_readable(its.slot):
            metrics.SSD_FAILURES.labels(reason="read").inc()
            its.arena.mark_failed(its.slot)
            self._on_change(
                BlocksRemoved(its.arena.layout.fingerprint, its.block.group, (its.block.block_hash,), "ssd")
            )
        self._pool.end_lease(its.lease)
        its.done(is_whole and is_known)
        self._tell_who_waits()
        self.pump()

    def _buffer(self, arena: FileArena) -> AlignedBuffer:
        buffers: dict[int, AlignedBuffer] = self._buffers.__dict__.setdefault("by_size", {})
        if arena.stride_bytes not in buffers:
            buffers[arena.stride_bytes] = AlignedBuffer(arena.stride_bytes)
        return buffers[arena.stride_bytes]

    # The end

    def check_integrity(self) -> None:
        """As `Pool.check_integrity`."""
        self._pool.check_integrity()

    def close(self) -> None:
        """Wait for the threads; what was not yet written is not kept."""
        self._is_closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._pool.close()
        os.close(self._lock)


def disk_bytes(directory: Path) -> int:
    """The size of the disk on which a directory is, or would be made."""
    return shutil.disk_usage(
        next(parent for parent in (directory.absolute(), *directory.absolute().parents) if parent.exists())
    ).total


def _check_disk(settings: SsdSettings) -> None:
    there = disk_bytes(settings.directory)
    if settings.budget_bytes > there:
        message = (
            f"{settings.budget_bytes >> 20}MiB, and the disk of {settings.directory} has {there >> 20}MiB; write less"
        )
        raise ConfigError(f"ssd_bytes: {message}")


def _lock(directory: Path) -> int:
    """Make the directory and have it for this process alone, for as long as the descriptor is open.

    Raises:
        ConfigError: it cannot be made or written to, or somebody else has it.
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
