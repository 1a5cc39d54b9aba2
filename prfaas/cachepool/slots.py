"""Slots of one arena: free slots, slots with prefix blocks, and the dependencies between blocks. Leases on slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType

from prfaas.cachepool.arena import SlotMemory
from prfaas.cachepool.block_run import MAX_RUN_BLOCKS, BlockIdentity, BlockRun
from prfaas.kv.kinds.kind import ChainKey
from prfaas.types import BlockHash

LeaseId = NewType("LeaseId", int)


@dataclass(eq=False)
class Lease:
    """Uses of slots by one owner. The owner's answer or death ends a lease, never time."""

    written: list[tuple[SlotTable, list[int]]] = field(default_factory=list)  # Slots that the lease was given.
    read: list[tuple[BlockRun, int]] = field(default_factory=list)  # Runs, and the end up to which each is read.
    is_quarantined: bool = False  # Somebody may still write to the slots, but nobody reads them any more.


class SlotTable:
    """Bookkeeping of one arena's slots. It keeps no budget and decides nothing.

    Rows of slots are free, hold one block each, or are *split*: each slot then holds a piece or is free. A block is known
    by its first slot.

    A block *depends on* another if that block must not leave before it. A run is *forgotten* if it is in no table any
    more and exists only until its uses end.
    """

    def __init__(self, number: int, arena: SlotMemory) -> None:
        groups, self._shape = arena.layout.groups, arena.shape
        self.number = number
        self.arena = arena
        self.never_used = 0  # The first slot that was never given out.
        self.free: list[int] = []  # Free rows whose pages are in memory, by their first slots.
        self.given_back: list[int] = []  # Free rows whose pages went back to the system.
        self.split: dict[int, list[int]] = {}  # Free slots of each split row.
        self._open_rows: dict[int, None] = {}  # Split rows with free slots.
        self.num_split_free = 0  # Free slots of all split rows.
        self.run_of: list[BlockRun | None] = []  # The run whose block a slot holds.
        self.by_hash: tuple[dict[BlockHash, int], ...] = tuple({} for _ in groups)
        self.states: tuple[dict[BlockHash, dict[BlockHash, int]], ...] = tuple({} for _ in groups)
        self.barred: set[int] = set()  # Slots in use whose contents nobody finds or gets until they are free.
        self.awaited: tuple[dict[BlockHash, int], ...] = tuple({} for _ in groups)  # Children of absent blocks.
        self.is_state = tuple(group.is_state for group in groups)
        self._first_attention = next((i for i, group in enumerate(groups) if group.keeps_all_tokens), None)

    def block_bytes(self, group: int) -> int:
        """Return the bytes of the slots that a block of a group takes."""
        return self._shape.slots_per_block[group] * self._shape.stride_bytes

    def _takes_rows(self, group: int) -> bool:
        return self._shape.slots_per_block[group] == self._shape.slots_per_row

    def num_slots_at(self, slot: int) -> int:
        """Return how many slots the block takes that begins with a used slot."""
        row = self._shape.slots_per_row
        return 1 if slot - slot % row in self.split else row

    @property
    def backed_bytes(self) -> int:
        """Bytes of the slots whose pages are, or may be, in memory."""
        return (self.never_used - len(self.given_back) * self._shape.slots_per_row) * self._shape.stride_bytes

    @property
    def num_free(self) -> int:
        """Slots that were used, and hold nothing."""
        return (len(self.free) + len(self.given_back)) * self._shape.slots_per_row + self.num_split_free

    @property
    def num_prefix(self) -> int:
        """Slots that hold prefix blocks."""
        return sum(len(hashes) * num for hashes, num in zip(self.by_hash, self._shape.slots_per_block, strict=True))

    def _num_new_rows(self, group: int, num_blocks: int) -> int:
        """Return how many free rows the next blocks of a group need."""
        if self._takes_rows(group):
            return num_blocks
        return max(0, -(-(num_blocks - self.num_split_free) // self._shape.slots_per_row))

    def fresh_bytes(self, group: int, num_blocks: int) -> int:
        """Return the bytes of new pages that the next blocks of a group would need."""
        return max(0, self._num_new_rows(group, num_blocks) - len(self.free)) * self._shape.row_bytes

    def take(self, group: int, num_blocks: int) -> list[int] | None:
        """Return free slots for blocks of a group, each of a new generation, or None when there are not that many."""
        num_rows = self._num_new_rows(group, num_blocks)
        num_unused = (self.arena.num_slots - self.never_used) // self._shape.slots_per_row
        if num_rows > len(self.free) + len(self.given_back) + num_unused:
            return None
        taken = _pop(self.free, num_rows)
        taken += _pop(self.given_back, num_rows - len(taken))
        taken += self._extend(num_rows - len(taken))
        # Readers of a piece look at its own slot.
        self.arena.bump(self._slots_of(taken))
        return taken if self._takes_rows(group) else self._split(taken, num_blocks)

    def _split(self, rows: Sequence[int], num_pieces: int) -> list[int]:
        """Split these rows, and return free slots of split rows."""
        taken: list[int] = []
        for first in rows:
            self._open_row(first, list(self._slots_of([first]))[::-1])
        while len(taken) < num_pieces:
            first = next(iter(self._open_rows))
            taken += _pop(self.split[first], num_pieces - len(taken))[::-1]
            if not self.split[first]:
                del self._open_rows[first]
        self.num_split_free -= num_pieces
        self.arena.bump(taken)
        return taken

    def _open_row(self, first: int, free: Sequence[int]) -> None:
        """Add free slots to a row, which is split if it is not split yet."""
        self.split.setdefault(first, []).extend(free)
        self.num_split_free += len(free)
        if self.split[first]:
            self._open_rows[first] = None

    def _slots_of(self, rows: Iterable[int]) -> Iterator[int]:
        """Yield all slots of rows."""
        row = self._shape.slots_per_row
        return (slot for first in rows for slot in range(first, first + row)) if row > 1 else iter(rows)

    def _extend(self, num_rows: int) -> list[int]:
        """Return rows that were never used."""
        row, start = self._shape.slots_per_row, self.never_used
        self.never_used += num_rows * row
        self.run_of += [None] * (num_rows * row)
        return list(range(start, self.never_used, row))

    def take_never_used(self, num_bytes: int) -> range:
        """Take at most so many bytes of adjacent slots that were never used. `put_back_unused` frees them."""
        num_unused = (self.arena.num_slots - self.never_used) // self._shape.slots_per_row
        start = self.never_used
        self._extend(min(num_bytes // self._shape.row_bytes, num_unused))
        return range(start, self.never_used)

    def put_back_unused(self, taken: range) -> None:
        """Free the slots of `take_never_used`."""
        self.free += taken[:: self._shape.slots_per_row]

    def reserve(self, blocks: Mapping[int, BlockIdentity]) -> None:
        """Take the slots of these blocks in an arena that was never used."""
        row = self._shape.slots_per_row
        rows = {slot - slot % row for slot in blocks}
        self._extend(max(rows, default=-row) // row + 1)
        for first in {slot - slot % row for slot, block in blocks.items() if not self._takes_rows(block.group)}:
            self._open_row(first, [slot for slot in range(first, first + row) if slot not in blocks])
        self.free += sorted(set(range(0, self.never_used, row)) - rows, reverse=True)

    def give_back(self, num_bytes: int) -> int:
        """Return the pages of free rows of about so many bytes to the system, and their bytes; late readers notice it.

        Raises:
            OSError: the system refuses; the rows are free as before.
        """
        returned = self.free[-min(len(self.free), -(-num_bytes // self._shape.row_bytes)) :]
        slots = list(self._slots_of(returned))
        self.arena.bump(slots)
        self.arena.give_back(slots)
        del self.free[len(self.free) - len(returned) :]
        self.given_back += returned
        return len(returned) * self._shape.row_bytes

    def put_back(self, gone: Sequence[int]) -> None:
        """Free the slots of these blocks. Barred slots are bumped, so that readers and the SSD's next start notice."""
        if self.barred:
            forgotten = self.barred.intersection(gone)
            self.arena.bump(forgotten)
            self.barred -= forgotten
        if not self.split:
            self.free += gone
            return
        row = self._shape.slots_per_row
        for slot in gone:
            first = slot - slot % row
            if first not in self.split:
                self.free.append(slot)
                continue
            self._open_row(first, [slot])
            if len(self.split[first]) == row:
                del self.split[first], self._open_rows[first]
                self.num_split_free -= row
                self.free.append(first)

    def stretches(self, used: Sequence[int]) -> Iterator[tuple[BlockRun | None, int, int, int]]:
        """Yield the slots in order as (run or None, position, start, end), as far as each holds the run's next block."""
        start, run_of = 0, self.run_of
        while start < len(used):
            run, position = run_of[used[start]], 0
            if run is None:
                end = next((i for i in range(start, len(used)) if run_of[used[i]] is not None), len(used))
            else:
                position = run.slots.index(used[start])
                end = start + run.num_equal(position, used, start)
            yield run, position, start, end
            start = end

    # Chains

    def chain_parent(self, block: BlockIdentity) -> ChainKey | None:
        """Return the block that this block depends on."""
        rules = self.arena.layout.groups[block.group].rules
        return rules.chain_parent(block.group, block.block_hash, block.before, attention_group=self._first_attention)

    def run_with(self, key: ChainKey | None) -> BlockRun | None:
        """Return the run that holds this block."""
        slot = None if key is None else self.by_hash[key[0]].get(key[1])
        return None if slot is None else self.run_of[slot]

    def add_child(self, key: ChainKey | None) -> BlockRun | None:
        """Count a block that depends on `key`, stored or not, and return the run with `key` if it is stored."""
        run = self.run_with(key)
        if key is not None and run is None:
            awaited = self.awaited[key[0]]
            awaited[key[1]] = awaited.get(key[1], 0) + 1
        elif key is not None and run is not None:
            run.add_child(run.position_of(key[1]))
        return run

    def drop_child(self, key: ChainKey | None) -> BlockRun | None:
        """Uncount a block that hung on `key`, and return the run with `key` if it is stored."""
        run = self.run_with(key)
        if run is not None and key is not None:
            run.drop_child(run.position_of(key[1]))
        elif key is not None:
            awaited = self.awaited[key[0]]
            awaited[key[1]] -= 1
            if not awaited[key[1]]:
                del awaited[key[1]]
        return run

    # Prefix blocks

    def is_new(self, taken: Sequence[int], group: int, hashes: Sequence[BlockHash], parent: BlockHash) -> bool:
        """Return whether none of these blocks is here, and none of the slots holds another block."""
        distinct = set(hashes)
        return (
            not self.is_state[group]
            and len(distinct) == len(hashes)
            and parent not in distinct
            and self.by_hash[group].keys().isdisjoint(distinct)
            and not any(map(self.run_of.__getitem__, taken))
            and self.barred.isdisjoint(taken)
        )

    def store(
        self, taken: Sequence[int], hashes: Sequence[BlockHash], first: BlockIdentity, above: ChainKey | None, now: int
    ) -> None:
        """Store blocks of one chain. `first` describes the first block, which depends on `above`."""
        group, parent, start = first.group, first.parent, 0
        self.by_hash[group].update(zip(hashes, taken, strict=True))
        block_tokens = self.arena.layout.groups[group].block_tokens
        if self.is_state[group]:
            self.states[group].setdefault(parent, {})[hashes[0]] = first.num_tokens
        run = self._growing_run(first, above)
        while start < len(taken):
            if run is None or len(run) >= MAX_RUN_BLOCKS:
                tokens = first.num_tokens + start * block_tokens
                self.add_child(above)
                run = BlockRun(self.number, group, above, parent, tokens, block_tokens, first.root)
            end = start + MAX_RUN_BLOCKS - len(run)
            run.grow(taken[start:end], hashes[start:end], now)
            for slot in taken[start:end]:
                self.run_of[slot] = run
            parent, above, start = run.hashes[-1], (group, run.hashes[-1]), end
        self._adopt(group, hashes)

    def _growing_run(self, first: BlockIdentity, above: ChainKey | None) -> BlockRun | None:
        """Return the run to which the block after `above` may be appended."""
        run = self.run_with(above) if above == (first.group, first.parent) else None
        follows = run is not None and run.hashes[-1] == first.parent and run.tokens_at(len(run)) == first.num_tokens
        return run if follows else None

    def _adopt(self, group: int, hashes: Sequence[BlockHash]) -> None:
        """Hang blocks that were stored before their parents on these parents."""
        awaited = self.awaited[group]
        for block_hash in awaited.keys() & hashes if awaited else ():
            run = self.run_with((group, block_hash))
            assert run is not None
            run.children[run.position_of(block_hash)] = awaited.pop(block_hash)

    def cut(self, run: BlockRun, num_blocks: int) -> tuple[list[int], list[BlockHash]]:
        """Remove the last blocks of a run and return their slots and hashes, the tail first."""
        is_forgotten = self.is_forgotten(run)
        gone, hashes = run.cut(num_blocks)
        by_hash, run_of = self.by_hash[run.group], self.run_of
        for slot in gone:
            run_of[slot] = None
        if is_forgotten:
            return gone, hashes
        for block_hash in hashes:
            del by_hash[block_hash]
        states = self.states[run.group].get(run.parent)
        if states is not None:
            states.pop(hashes[0], None)
            if not states:
                del self.states[run.group][run.parent]
        return gone, hashes

    def forget(self) -> list[BlockRun]:
        """Remove every block from the tables, bar the slots in use, and return the runs, children first.

        Afterwards the runs depend on nothing, and nothing depends on them.
        """
        found = [run for run in self.runs() if not self.is_forgotten(run)]
        found.sort(key=lambda run: (run.num_tokens, self.is_state[run.group]), reverse=True)
        for run in found:
            run.above = None
            run.children.clear()
        for hashes, states, awaited in zip(self.by_hash, self.states, self.awaited, strict=True):
            hashes.clear()
            states.clear()
            awaited.clear()
        self.barred = set(range(0, self.never_used, self._shape.slots_per_row)).difference(self.free, self.given_back)
        for first, free in self.split.items():
            self.barred.discard(first)
            self.barred.update(set(self._slots_of([first])).difference(free))
        return found

    def is_forgotten(self, run: BlockRun) -> bool:
        return bool(self.barred and run.slots) and run.slots[0] in self.barred

    def runs(self) -> list[BlockRun]:
        """Return every run once. O(slots)."""
        return list(dict.fromkeys(run for run in self.run_of if run is not None))


def _pop(stack: list[int], num_slots: int) -> list[int]:
    """Remove and return up to `num_slots` from the end of a list."""
    popped = stack[-num_slots:] if num_slots > 0 else []
    del stack[len(stack) - len(popped) :]
    return popped
