"""What one node holds, as its agent knows it: pool events in, announcements and digests out.

An event names a block by its hash and its parent; the index wants a path from the head of the block's cell, which the
ancestry of its blocks can tell at any time, also when everything is announced anew. A block whose parent was never seen
is an orphan: it is kept apart and announced when its parent appears. Blocks that come as a run are taken as one where
all of them are new, or all are known already: of another group or tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from prfaas.errors import IndexRefusal
from prfaas.index.ancestry import Ancestry, ShardedSet
from prfaas.index.segments import (
    TAIL_BYTES,
    Announcement,
    Checkpoint,
    Digest,
    Holding,
    Segment,
    digest_of_hash,
    digest_of_hashes,
    grid_tokens,
)
from prfaas.kv.layout import Layout
from prfaas.pool_events import BlockRemoved, BlocksRemoved, BlocksStored, BlockStored, PoolChange, PoolEvent, Tier
from prfaas.types import BlockHash

Change = PoolChange | PoolEvent
_Fresh = dict[Holding, set[BlockHash]]  # what changed and is not told yet
_Orphan = tuple[Holding, BlockHash]
_Missing = tuple[int, BlockHash]  # block size and parent
_NONE = ShardedSet()


class Inventory:
    """All prefix blocks of one node's pool."""

    def __init__(self) -> None:
        self._layouts: dict[bytes, Layout] = {}
        self._places: dict[tuple[bytes, int, Tier], tuple[Holding, int]] = {}
        self._ancestry: dict[int, Ancestry] = {}  # by block size
        self._held: dict[Holding, ShardedSet] = {}
        self._exact: dict[Holding, dict[BlockHash, Checkpoint]] = {}
        self._orphans: dict[_Missing, dict[_Orphan, BlockStored]] = {}
        self._missing: dict[_Orphan, _Missing] = {}  # what each orphan waits for
        self._digests: dict[Holding, Digest] = {}
        self.num_refused = 0  # events that contradict the chain they claim to belong to

    def add_layout(self, layout: Layout) -> None:
        """Make a layout known; events of other layouts are refused."""
        self._layouts[layout.fingerprint] = layout

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(self._layouts.values())

    @property
    def num_orphans(self) -> int:
        return len(self._missing)

    def digests(self) -> dict[Holding, Digest]:
        """Per holding with anything in it; what the index must arrive at. Any thread may ask."""
        return {holding: digest for holding, digest in list(self._digests.items()) if digest != Digest()}

    def check(self, event: Change) -> None:
        """Raises:
        IndexRefusal: the event's layout or group is unknown.
        """
        self._place(event)

    def apply(self, events: Iterable[Change]) -> list[Announcement]:
        """Take changes of the pool in order; returns what to announce of them.

        Raises:
            IndexRefusal: an event's layout or group is unknown.
        """
        announcements: list[Announcement] = []
        for stored, batch in groupby(events, key=lambda event: isinstance(event, BlocksStored | BlockStored)):
            fresh: _Fresh = {}
            exact = [its for event in batch for its in self._take(event, fresh)]
            for holding, hashes in fresh.items():
                announcements += self._segments(holding, hashes, stored=stored)
                before, changed = self._digests.get(holding, Digest()), digest_of_hashes(hashes)
                self._digests[holding] = before.plus(changed) if stored else before.minus(changed)
                if not stored:
                    self._drop(holding, hashes)
            announcements += exact  # after the blocks that they may end with
        return announcements

    def everything(self) -> list[Announcement]:
        """All that is held, as announcements to an index that knows nothing of this node."""
        blocks = [
            segment for holding, held in self._held.items() for segment in self._segments(holding, held, stored=True)
        ]
        return [*blocks, *(its for exact in self._exact.values() for its in exact.values())]

    def _take(self, event: Change, fresh: _Fresh) -> list[Announcement]:
        """Apply one change; what of it is not told by the cell."""
        if isinstance(event, BlockStored):
            return self._store(event, fresh)
        if isinstance(event, BlockRemoved):
            return self._remove(event, fresh)
        if isinstance(event, BlocksStored):
            if self._store_run(event, fresh):
                return []
            return [its for block in event.each() for its in self._store(block, fresh)]
        if self._remove_run(event, fresh):
            return []
        return [its for block in event.each() for its in self._remove(block, fresh)]

    def _store_run(self, event: BlocksStored, fresh: _Fresh) -> bool:
        """Take a run of blocks as one, all new or all known; False where it has to be taken block by block."""
        holding, block_tokens = self._place(event)
        are_full = block_tokens and block_tokens == event.block_tokens and not event.num_tokens % block_tokens
        if not are_full or not event.hashes or self._is_missed(block_tokens, event.hashes):
            return False
        held = self._held_of(holding)
        new = held.lacking(event.hashes)
        ancestry = self._ancestry.setdefault(block_tokens, Ancestry())
        index = event.num_tokens // block_tokens - 1
        if ancestry.knows(event.hashes):
            ancestry.use_each(new)
        elif not ancestry.add_run(event.hashes, parent=event.parent, index=index):
            return False
        held.update(new)
        fresh.setdefault(holding, set()).update(new)
        return True

    def _held_of(self, holding: Holding) -> ShardedSet:
        held = self._held.get(holding)
        if held is None:
            held = self._held[holding] = ShardedSet()
        return held

    def _is_missed(self, block_tokens: int, hashes: Iterable[BlockHash]) -> bool:
        """Whether one of these is the parent that some orphan waits for."""
        return bool(self._orphans) and any((block_tokens, block_hash) in self._orphans for block_hash in hashes)

    def _remove_run(self, event: BlocksRemoved, fresh: _Fresh) -> bool:
        """Take the end of blocks that are all held as one; False where it has to be taken block by block."""
        holding, _ = self._place(event)
        if not self._held.get(holding, _NONE).has_all(event.hashes):
            return False
        fresh.setdefault(holding, set()).update(event.hashes)
        return True

    def _place(self, event: Change) -> tuple[Holding, int]:
        """The event's holding and the tokens of one of its blocks. Raises as `_block_tokens`."""
        key = (event.layout, event.group, event.tier)
        known = self._places.get(key)
        if known is None:
            holding = Holding(*key)
            known = self._places[key] = (holding, self._block_tokens(holding))
        return known

    def _block_tokens(self, holding: Holding) -> int:
        """Tokens of one block, 0 for a linear state.

        Raises:
            IndexRefusal: the layout or its group is unknown.
        """
        layout = self._layouts.get(holding.layout)
        if layout is None or not 0 <= holding.group < len(layout.groups):
            raise IndexRefusal("unknown_layout", f"no layout {holding.layout.hex()} with a group {holding.group}")
        group = layout.groups[holding.group]
        return 0 if group.is_state else group.block_tokens

    def _store(self, event: BlockStored, fresh: _Fresh) -> list[Announcement]:
        holding, block_tokens = self._place(event)
        if not block_tokens or event.num_tokens % block_tokens:
            return self._store_exact(holding, event)
        waiting = [event]
        while waiting:  # a block may be the missing parent of others, and those of others again
            block = waiting.pop()
            if self._link(block, block_tokens):
                self._hold(self._place(block)[0], block.block_hash, block_tokens, fresh)
                waiting += self._taken_orphans((block_tokens, block.block_hash))
        return []

    def _store_exact(self, holding: Holding, event: BlockStored) -> list[Announcement]:
        head = self._head_before(holding, event)
        its = Checkpoint(holding, event.block_hash, event.parent, event.num_tokens, stored=True, head=head)
        exact = self._exact.setdefault(holding, {})
        if event.block_hash in exact:
            return []
        exact[event.block_hash] = its
        self._digests[holding] = self._digests.get(holding, Digest()).plus(digest_of_hash(event.block_hash))
        return [its]

    def _head_before(self, holding: Holding, event: BlockStored) -> BlockHash | None:
        """Of a linear state, the head of the cell with the block that it ends with, if that block is known."""
        layout = self._layouts[holding.layout]
        grid = grid_tokens(layout)
        ancestry = self._ancestry.get(grid)
        is_state = layout.groups[holding.group].is_state
        if not is_state or ancestry is None or event.num_tokens % grid or event.block_hash not in ancestry:
            return None
        return ancestry.head(event.block_hash)

    def _link(self, event: BlockStored, block_tokens: int) -> bool:
        """Give the block its place in its chain; False when its parent is missing or is not where it should be."""
        ancestry = self._ancestry.setdefault(block_tokens, Ancestry())
        index = event.num_tokens // block_tokens - 1
        if event.block_hash in ancestry:
            return True
        if event.parent in ancestry:
            if not ancestry.follows(event.parent, index):
                self.num_refused += 1
                return False
        elif index:
            self._keep_orphan(event, (block_tokens, event.parent))
            return False
        ancestry.add(event.block_hash, parent=event.parent, index=index)
        return True

    def _hold(self, holding: Holding, block_hash: BlockHash, block_tokens: int, fresh: _Fresh) -> None:
        held = self._held_of(holding)
        if block_hash in held:
            return
        held.add(block_hash)
        self._ancestry[block_tokens].use(block_hash)
        fresh.setdefault(holding, set()).add(block_hash)

    def _remove(self, event: BlockRemoved, fresh: _Fresh) -> list[Announcement]:
        holding, _ = self._place(event)
        its = self._exact.get(holding, {}).pop(event.block_hash, None)
        if its is not None:
            self._digests[holding] = self._digests[holding].minus(digest_of_hash(event.block_hash))
            return [replace(its, stored=False)]
        if event.block_hash in self._held.get(holding, ()):
            fresh.setdefault(holding, set()).add(event.block_hash)
        else:
            self._forget_orphan((holding, event.block_hash))
        return []

    def _keep_orphan(self, block: BlockStored, missing: _Missing) -> None:
        orphan = (self._place(block)[0], block.block_hash)
        self._forget_orphan(orphan)
        self._missing[orphan] = missing
        self._orphans.setdefault(missing, {})[orphan] = block

    def _taken_orphans(self, missing: _Missing) -> Iterable[BlockStored]:
        """Those that wait for this parent, which wait no longer."""
        found = self._orphans.pop(missing, {})
        for orphan in found:
            del self._missing[orphan]
        return found.values()

    def _forget_orphan(self, orphan: _Orphan) -> None:
        missing = self._missing.pop(orphan, None)
        if missing is not None:
            del self._orphans[missing][orphan]
            if not self._orphans[missing]:
                del self._orphans[missing]

    def _drop(self, holding: Holding, hashes: set[BlockHash]) -> None:
        ancestry = self._ancestry[self._block_tokens(holding)]
        self._held[holding].discard_each(hashes)
        for block_hash in hashes:
            ancestry.release(block_hash)

    def _segments(self, holding: Holding, hashes: Iterable[BlockHash], *, stored: bool) -> Iterator[Segment]:
        """The blocks as segments: one per cell and chain, deepest first."""
        remaining = set(hashes)
        if not remaining:
            return
        ancestry = self._ancestry[self._block_tokens(holding)]
        for block_hash in ancestry.deepest_first(remaining):
            if block_hash not in remaining:
                continue
            path = ancestry.path(block_hash)
            bitmap = _bitmap(path, remaining)
            remaining.difference_update(path)
            yield Segment(holding, path[0], b"".join([its[:TAIL_BYTES] for its in path]), bitmap, stored)


def _bitmap(path: list[BlockHash], wanted: set[BlockHash]) -> int:
    """Which blocks of a path are wanted."""
    if wanted.issuperset(path):
        return (1 << len(path)) - 1
    return sum(1 << index for index, its in enumerate(path) if its in wanted)
