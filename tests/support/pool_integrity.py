"""Comparison of a pool's bookkeeping with what it is derived from."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from prfaas.cachepool.block_run import MAX_RUN_BLOCKS, BlockRun
from prfaas.cachepool.pool import SlotPool
from prfaas.cachepool.slots import SlotTable
from prfaas.kv.kinds.kind import ChainKey


def check_integrity(pool: SlotPool[Any]) -> None:
    """Raise AssertionError if something leaks, is counted twice or can be evicted though it is needed."""
    leases = list(pool._leases.values())
    prefix_bytes = transfer_bytes = 0
    for slots in pool.tables:
        written = [slot for lease in leases for table, used in lease.written if table is slots for slot in used]
        _check_slots(slots, written)
        stride_bytes = slots.arena.shape.stride_bytes
        prefix_bytes += sum(len(run) * slots.block_bytes(run.group) for run in slots.runs())
        unpublished = [slot for slot in written if slots.run_of[slot] is None]
        transfer_bytes += sum(map(slots.num_slots_at, unpublished)) * stride_bytes
    counts = (pool._capacity.used_bytes, pool._transfer_bytes)
    assert (prefix_bytes, transfer_bytes) == counts, "a byte count is wrong"
    assert transfer_bytes <= pool._transfer_budget, "the transfer budget is exceeded"
    runs = [(run, slots) for slots in pool.tables for run in slots.runs()]
    _check_capacity(pool, runs)
    readers = Counter(run for lease in leases for run, _ in lease.read)
    assert all(sum(run.readers.values()) == readers.pop(run, 0) for run, _ in runs), "readers differ from the leases"
    assert not readers, "a lease reads a run that is gone"


def _check_capacity(pool: SlotPool[Any], runs: Sequence[tuple[BlockRun, SlotTable]]) -> None:
    capacity = pool._capacity
    evictable = {run for run, _ in runs if run.num_kept() < len(run)}
    assert all(run in capacity.candidates for run in evictable), "an idle tail cannot be evicted"
    assert len(evictable) == len(capacity.candidates), "a block is evictable though it is needed"
    used = Counter[Any]()
    for run, slots in runs:
        used[pool.account_of(run)] += len(run) * slots.block_bytes(run.group)
    probation_bytes = sum((len(run) - run.num_read) * slots.block_bytes(run.group) for run, slots in runs)
    assert probation_bytes == capacity.probation.used_bytes, "unread blocks are miscounted"
    assert used.total() == capacity.used_bytes <= capacity.budget_bytes, "the prefix budget is exceeded or miscounted"
    for account in (capacity._unlimited, *capacity._by_name.values()):
        assert account.used_bytes == used[account], "a tenant's bytes are miscounted"
        assert account.limit_bytes is None or account.used_bytes <= account.limit_bytes, "a tenant holds too much"


def _check_slots(slots: SlotTable, written: Sequence[int]) -> None:
    row, runs = slots.arena.shape.slots_per_row, slots.runs()
    rows = [slot for first in slots.free + slots.given_back for slot in range(first, first + row)]
    pieces = [slot for free in slots.split.values() for slot in free]
    absent = set(rows + pieces)
    assert len(pieces) == slots.num_split_free, "free slots of split rows are miscounted"
    assert all(len(free) < row for free in slots.split.values()), "a row is split for nothing"
    forgotten = [run for run in runs if slots.is_forgotten(run)]
    held = {slot for run in runs for slot in run.slots}
    assert len(absent) == len(rows) + len(pieces) == slots.num_free, "a slot is free twice"
    assert len(set(written)) == len(written), "a slot is given out twice"
    taken = [slot for first in held | set(written) for slot in range(first, first + slots.num_slots_at(first))]
    assert len(set(taken)) == len(taken), "two blocks overlap"
    assert not absent & set(taken), "a free slot is in use"
    assert len(taken) + len(absent) == slots.never_used, "a slot is neither free nor in use"
    for run in runs:
        assert 0 < len(run) == len(run.hashes) <= MAX_RUN_BLOCKS, "a run is empty, uneven or too long"
        assert run.num_written == len(set(run.slots) & set(written)), "the blocks still written are miscounted"
    assert not slots.barred & absent, "a free slot is barred"
    for run in forgotten:
        assert slots.barred.issuperset(run.slots), "a part of a run is forgotten"
        assert run.above is None and not run.children, "something hangs on a forgotten run"
    runs = [run for run in runs if run not in forgotten]
    assert all(slots.barred.isdisjoint(run.slots) for run in runs), "a part of a run is forgotten"
    placed = {(run.group, key): slot for run in runs for key, slot in zip(run.hashes, run.slots, strict=True)}
    found = {(group, key): slot for group, table in enumerate(slots.by_hash) for key, slot in table.items()}
    assert placed == found, "blocks are not found under their hashes"
    assert all(slots.run_of[slot] is run for run in runs for slot in run.slots), "a slot knows another run"
    _check_chains(slots, runs)


def _check_chains(slots: SlotTable, runs: Sequence[BlockRun]) -> None:
    counted: Counter[ChainKey] = Counter(run.above for run in runs if run.above is not None)
    kept = {(group, key): number for group, table in enumerate(slots.awaited) for key, number in table.items()}
    assert not kept.keys() & {(run.group, key) for run in runs for key in run.hashes}, "a stored block is awaited"
    kept |= {(run.group, run.hashes[at]): number for run in runs for at, number in run.children.items()}
    assert dict(counted) == kept, "counts of children differ from the chains"
    states = {(run.group, run.parent, run.hashes[0]) for run in runs if slots.is_state[run.group]}
    listed = {(g, unit, key) for g, table in enumerate(slots.states) for unit, keys in table.items() for key in keys}
    assert states == listed, "states are not found under their last unit"
