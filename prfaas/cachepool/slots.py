"""Leases: who uses which slots. Its owner ends a lease, by an answer or when it is found dead; never time."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NewType

from prfaas.cachepool.arena import SlotMemory
from prfaas.cachepool.block_run import MAX_RUN_BLOCKS, BlockRun, ChainKey
from prfaas.cachepool.eviction import BlockFacts
from prfaas.types import BlockHash

LeaseId = NewType("LeaseId", int)


@dataclass(eq=False)
class Lease:
    """Uses of slots by one owner, whose name is for people."""

    owner: str
    written: list[tuple[SlotTable, list[int]]] = field(default_factory=list)  # slots that the lease was given
    read: list[tuple[BlockRun, int]] = field(default_factory=list)  # runs, and the end of what is read of them


class Leases:
    """All leases of a pool."""

    def __init__(self) -> None:
        self._by_id: dict[LeaseId, Lease] = {}
        self._ids = itertools.count(1)
        self._quarantined: dict[LeaseId, Lease] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, owner: str) -> LeaseId:
        lease = LeaseId(next(self._ids))
        self._by_id[lease] = Lease(owner)
        return lease

    def __getitem__(self, lease: LeaseId) -> Lease:
        """Raises KeyError when the lease has ended."""
        return self._by_id[lease]

    def is_open(self, lease: LeaseId) -> bool:
        return lease in self._by_id

    def end(self, lease: LeaseId) -> Lease:
        """Forget the lease; the caller ends its uses. An empty one when it has ended before."""
        ended = self._by_id.pop(lease, None)
        if ended is None:
            return Lease("")
        self._quarantined.pop(lease, None)
        return ended

    def quarantine(self, lease: LeaseId) -> None:
        """Somebody may still write to its slots. Raises KeyError when it has ended."""
        self._quarantined[lease] = self._by_id[lease]

    def quarantined(self) -> list[Lease]:
        """From any thread."""
        return list(self._quarantined.values())

    def all(self) -> list[Lease]:
        return list(self._by_id.values())


class SlotTable:
    """Bookkeeping of one arena's slots; keeps no budget and decides nothing."""

    def __init__(self, number: int, arena: SlotMemory) -> None:
        groups = arena.layout.groups
        self.number = number
        self.arena = arena
        self.never_used = 0  # slots from here on were never given out
        self.free: list[int] = []  # their pages are there
        self.given_back: list[int] = []  # free, their pages went back to the system
        self.run_of: list[BlockRun | None] = []  # slot → the run whose block it holds
        self.by_hash: tuple[dict[BlockHash, int], ...] = tuple({} for _ in groups)
        self.states: tuple[dict[BlockHash, dict[BlockHash, int]], ...] = tuple({} for _ in groups)
        self.soft_pinned: set[int] = set()
        self.barred: set[int] = set()  # in use, and until they are free nobody finds what they hold or get
        self._awaited: tuple[dict[BlockHash, int], ...] = tuple({} for _ in groups)  # absent → how many hang on it
        self._is_state = tuple(group.is_state for group in groups)
        self._first_attention = next((i for i, group in enumerate(groups) if group.keeps_all_tokens), None)

    @property
    def num_backed(self) -> int:
        """Slots whose pages are, or may be, in memory."""
        return self.never_used - len(self.given_back)

    @property
    def num_blocks(self) -> int:
        """Slots that hold prefix blocks."""
        return sum(map(len, self.by_hash))

    def is_state(self, group: int) -> bool:
        """Whether its blocks are linear states."""
        return self._is_state[group]

    def num_fresh(self, num_slots: int) -> int:
        """How many of the next `num_slots` slots would need new pages."""
        return max(0, num_slots - len(self.free))

    def take(self, num_slots: int) -> list[int] | None:
        """Free slots, each of a new generation; None when there are not that many."""
        if num_slots > len(self.free) + len(self.given_back) + self.arena.num_slots - self.never_used:
            return None
        taken = _pop(self.free, num_slots)
        taken += _pop(self.given_back, num_slots - len(taken))
        taken += self._first_time(num_slots - len(taken))
        self.arena.bump(taken)
        return taken

    def _first_time(self, num_slots: int) -> list[int]:
        start, self.never_used = self.never_used, self.never_used + num_slots
        self.run_of += [None] * num_slots
        return list(range(start, self.never_used))

    def reserve(self, taken: Collection[int]) -> None:
        """Take these slots of an arena that was never used."""
        self._first_time(max(taken, default=-1) + 1)
        self.free += sorted(set(range(self.never_used)).difference(taken), reverse=True)

    def give_back(self, num_slots: int) -> None:
        """Return the pages of that many free slots, at least one, to the system; who still reads one hears of it first.

        Raises:
            OSError: the system refuses; the slots are free as before.
        """
        returned = self.free[-num_slots:]
        self.arena.bump(returned)
        self.arena.give_back(returned)
        del self.free[-num_slots:]
        self.given_back += returned

    def put_back(self, gone: Sequence[int]) -> None:
        """These slots are free; what was barred in them is told to readers, and on an SSD to the next life of the pool."""
        if self.barred:
            forgotten = self.barred.intersection(gone)
            self.arena.bump(forgotten)
            self.barred -= forgotten
        self.free += gone

    def stretches(self, used: Sequence[int]) -> Iterator[tuple[BlockRun | None, int, int, int]]:
        """The slots in order, as far as each holds the next block of one run: (run or None, position, start, end)."""
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

    def chain_parent(self, group: int, block_hash: BlockHash, before: BlockHash) -> ChainKey | None:
        """Return the block that must not leave before this one."""
        rules = self.arena.layout.groups[group].rules
        return rules.chain_parent(group, block_hash, before, attention_group=self._first_attention)

    def run_with(self, key: ChainKey | None) -> BlockRun | None:
        """The run that holds this block."""
        slot = None if key is None else self.by_hash[key[0]].get(key[1])
        return None if slot is None else self.run_of[slot]

    def hang(self, key: ChainKey | None) -> BlockRun | None:
        """Count one more block that hangs on `key`, whether that is stored or not; the run with it when it is."""
        run = self.run_with(key)
        if key is not None and run is None:
            awaited = self._awaited[key[0]]
            awaited[key[1]] = awaited.get(key[1], 0) + 1
        elif key is not None and run is not None:
            run.add_child(run.position_of(key[1]))
        return run

    def unhang(self, key: ChainKey | None) -> BlockRun | None:
        """Count one less; the run with `key` when that is stored."""
        run = self.run_with(key)
        if run is not None and key is not None:
            run.drop_child(run.position_of(key[1]))
        elif key is not None:
            awaited = self._awaited[key[0]]
            awaited[key[1]] -= 1
            if not awaited[key[1]]:
                del awaited[key[1]]
        return run

    def chain(self, end_hash: BlockHash) -> list[int]:
        """The slots of the blocks that end with a hash, and of all that they hang on; a shared block once."""
        found: dict[int, None] = {}
        walk = self._ending_with(end_hash)
        for run, end in walk:  # grows as it is walked
            found |= dict.fromkeys(run.slots[: end + 1])
            above, parent = run.above, self.run_with(run.above)
            if above is not None and parent is not None:
                walk.append((parent, parent.position_of(above[1])))
        return list(found)

    def _ending_with(self, block_hash: BlockHash) -> list[tuple[BlockRun, int]]:
        """The runs, and where in them, of the blocks of this hash in every group."""
        runs = [self.run_with((group, block_hash)) for group in range(len(self.by_hash))]
        return [(run, run.position_of(block_hash)) for run in runs if run is not None]

    # Prefix blocks

    def is_new(self, taken: Sequence[int], group: int, hashes: Sequence[BlockHash], parent: BlockHash) -> bool:
        """Whether none of these blocks is here, and none of the slots holds another."""
        distinct = set(hashes)
        return (
            not self.is_state(group)
            and len(distinct) == len(hashes)
            and parent not in distinct
            and self.by_hash[group].keys().isdisjoint(distinct)
            and not any(map(self.run_of.__getitem__, taken))
            and self.barred.isdisjoint(taken)
        )

    def store(
        self,
        taken: Sequence[int],
        hashes: Sequence[BlockHash],
        *,
        group: int,
        parent: BlockHash,
        above: ChainKey | None,
        num_tokens: int,
        root: BlockHash,
        when: int,
    ) -> None:
        """The slots hold these blocks of one chain from here on, the first of which hangs on `above`."""
        self.by_hash[group].update(zip(hashes, taken, strict=True))
        block_tokens, start = self.arena.layout.groups[group].block_tokens, 0
        if self.is_state(group):
            self.states[group].setdefault(parent, {})[hashes[0]] = num_tokens
        run = self._growing(group, parent=parent, above=above, num_tokens=num_tokens)
        while start < len(taken):
            if run is None or len(run) >= MAX_RUN_BLOCKS:
                tokens = num_tokens + start * block_tokens
                self.hang(above)
                run = BlockRun(
                    self.number,
                    group,
                    above=above,
                    parent=parent,
                    num_tokens=tokens,
                    block_tokens=block_tokens,
                    root=root,
                )
            end = start + MAX_RUN_BLOCKS - len(run)
            self._append(run, taken[start:end], hashes[start:end], when)
            parent, above, start = run.hashes[-1], (group, run.hashes[-1]), end
        self._adopt(group, hashes)

    def _growing(self, group: int, *, parent: BlockHash, above: ChainKey | None, num_tokens: int) -> BlockRun | None:
        """The run that the block after `above` may be appended to."""
        run = self.run_with(above) if above == (group, parent) else None
        follows = run is not None and run.hashes[-1] == parent and run.tokens_at(len(run)) == num_tokens
        return run if follows else None

    def _append(self, run: BlockRun, taken: Sequence[int], hashes: Sequence[BlockHash], when: int) -> None:
        run.grow(taken, hashes, when)
        run_of = self.run_of
        for slot in taken:
            run_of[slot] = run

    def _adopt(self, group: int, hashes: Sequence[BlockHash]) -> None:
        """Blocks that were there before the ones they hang on are these ones' from here on."""
        awaited = self._awaited[group]
        for block_hash in awaited.keys() & hashes if awaited else ():
            run = self.run_with((group, block_hash))
            assert run is not None
            run.children[run.position_of(block_hash)] = awaited.pop(block_hash)

    def cut(self, run: BlockRun, num_blocks: int) -> tuple[list[int], list[BlockHash]]:
        """The last blocks of a run are no prefix blocks any more; their slots and hashes, from the tail on."""
        is_forgotten = self.is_forgotten(run)
        gone, hashes = run.cut(num_blocks)
        by_hash, run_of = self.by_hash[run.group], self.run_of
        for slot in gone:
            run_of[slot] = None
        if is_forgotten:  # out of every table already
            return gone, hashes
        for block_hash in hashes:
            del by_hash[block_hash]
        if self.soft_pinned:
            self.soft_pinned.difference_update(gone)
        states = self.states[run.group].get(run.parent)
        if states is not None:
            states.pop(hashes[0], None)
            if not states:
                del self.states[run.group][run.parent]
        return gone, hashes

    def forget(self) -> list[BlockRun]:
        """Take every block out of the tables, and bar what is in use or being written; the runs, what hung on others first.

        They hang on nothing afterwards, and nothing on them.
        """
        found = [run for run in self.runs() if not self.is_forgotten(run)]
        found.sort(key=lambda run: (run.num_tokens, self.is_state(run.group)), reverse=True)
        for run in found:
            run.above = None
            run.children.clear()
        for hashes in self.by_hash:
            hashes.clear()
        for states in self.states:
            states.clear()
        for awaited in self._awaited:
            awaited.clear()
        self.soft_pinned.clear()
        self.barred = set(range(self.never_used)).difference(self.free, self.given_back)
        return found

    def is_forgotten(self, run: BlockRun) -> bool:
        """Whether a run is in no table any more, and there only until its uses end."""
        return bool(self.barred and run.slots) and run.slots[0] in self.barred

    def evenly_pinned(self, run: BlockRun) -> int:
        """Position from which on all blocks of a run are soft-pinned, or none is."""
        pinned = self.soft_pinned
        if not pinned:
            return 0
        is_soft = run.slots[-1] in pinned
        others = (at for at in range(len(run) - 1, -1, -1) if (run.slots[at] in pinned) != is_soft)
        return next(others, -1) + 1

    def tail_facts(self, run: BlockRun) -> BlockFacts:
        """What an eviction policy may know of a run's last block."""
        last_used, num_uses = run.tail_uses()
        group, num_tokens = self.arena.layout.groups[run.group], run.tokens_at(len(run) - 1)
        saved_tokens = group.rules.saved_tokens(group, num_tokens)
        num_bytes = self.arena.stride_bytes
        return BlockFacts(saved_tokens, num_tokens, num_bytes, last_used=last_used, num_uses=num_uses)

    # Our own bookkeeping, checked

    def runs(self) -> list[BlockRun]:
        """Every run once. O(slots): for tests and diagnosis."""
        return list(dict.fromkeys(run for run in self.run_of if run is not None))

    def check_integrity(self, written: Sequence[int]) -> None:
        """Compare every table with what it is derived from; `written` are the slots that leases were given. O(slots).

        Raises:
            AssertionError: two tables disagree.
        """
        absent, runs = set(self.free + self.given_back), self.runs()
        forgotten = [run for run in runs if self.is_forgotten(run)]
        held = {slot for run in runs for slot in run.slots}
        assert len(absent) == len(self.free) + len(self.given_back), "a slot is free twice"
        assert len(set(written)) == len(written), "a slot is given out twice"
        assert not absent & (held | set(written)), "a free slot is in use"
        assert len(held | set(written)) + len(absent) == self.never_used, "a slot is neither free nor in use"
        for run in runs:
            assert 0 < len(run) == len(run.hashes) <= MAX_RUN_BLOCKS, "a run is empty, uneven or too long"
            assert run.num_written == len(set(run.slots) & set(written)), "the blocks still written are miscounted"
        assert not self.barred & absent, "a free slot is barred"
        for run in forgotten:
            assert self.barred.issuperset(run.slots), "a part of a run is forgotten"
            assert run.above is None and not run.children, "something hangs on what is forgotten"
        runs = [run for run in runs if run not in forgotten]
        assert all(self.barred.isdisjoint(run.slots) for run in runs), "a part of a run is forgotten"
        placed = {(run.group, key): slot for run in runs for key, slot in zip(run.hashes, run.slots, strict=True)}
        found = {(group, key): slot for group, table in enumerate(self.by_hash) for key, slot in table.items()}
        assert placed == found, "blocks are not found under their hashes"
        assert all(self.run_of[slot] is run for run in runs for slot in run.slots), "a slot knows another run"
        assert self.soft_pinned <= held, "a soft pin on something that is no prefix block"
        self._check_chains(runs)

    def _check_chains(self, runs: list[BlockRun]) -> None:
        counted: dict[ChainKey, int] = {}
        for run in runs:
            if run.above is not None:
                counted[run.above] = counted.get(run.above, 0) + 1
        kept = {(group, key): num for group, table in enumerate(self._awaited) for key, num in table.items()}
        assert not kept.keys() & {(run.group, key) for run in runs for key in run.hashes}, "a stored block is awaited"
        kept |= {(run.group, run.hashes[at]): num for run in runs for at, num in run.children.items()}
        assert counted == kept, "counts of children differ from the chains"
        states = {(run.group, run.parent, run.hashes[0]) for run in runs if self.is_state(run.group)}
        listed = {(g, unit, key) for g, table in enumerate(self.states) for unit, keys in table.items() for key in keys}
        assert states == listed, "states are not found under their last unit"


def _pop(stack: list[int], num_slots: int) -> list[int]:
    """Up to `num_slots` from the end of a list."""
    if num_slots <= 0:
        return []
    popped = stack[-num_slots:]
    del stack[-num_slots:]
    return popped
