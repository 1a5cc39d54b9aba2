"""The inventory of one node, as its agent knows it: pool events in, announcements and digests out.

An event names a block by its hash and its parent, while the index wants a path from the head of the block's cell. The
ancestry tells that path at any time, also when everything is announced again. A block whose parent was never seen is an
orphan: it is kept apart and announced when its parent appears. Windows in blocks of another size than full attention's
are announced without earlier blocks, which nobody holds. A run of blocks is taken at once if all are new or all are
known; the known ones belong to another group or tier.
"""

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
    begins_anywhere,
    digest_of_hash,
    digest_of_hashes,
    grid_tokens,
)
from prfaas.kv.layout import Layout
from prfaas.pool_events import BlockRemoved, BlocksRemoved, BlocksStored, BlockStored, PoolChange, PoolEvent, Tier
from prfaas.types import BlockHash

Change = PoolChange | PoolEvent
_Changed = dict[Holding, set[BlockHash]]  # Blocks of a batch that are not announced yet.
_Orphan = tuple[Holding, BlockHash]
_MissingParent = tuple[int, BlockHash]  # Block size and hash.
_NONE = ShardedSet()


class Inventory:
    """All prefix blocks of one node's pool."""

    def __init__(self) -> None:
        self._layouts: dict[bytes, Layout] = {}
        self._places: dict[tuple[bytes, int, Tier], tuple[Holding, int]] = {}
        self._begins_anywhere: set[tuple[bytes, int]] = set()  # Layout and group.
        self._ancestry: dict[int, Ancestry] = {}  # By block size.
        self._held: dict[Holding, ShardedSet] = {}
        self._exact: dict[Holding, dict[BlockHash, Checkpoint]] = {}
        self._orphans: dict[_MissingParent, dict[_Orphan, BlockStored]] = {}
        self._missing: dict[_Orphan, _MissingParent] = {}  # The parent that each orphan waits for.
        self._digests: dict[Holding, Digest] = {}
        self.num_refused = 0  # Events that contradict the chain that they claim to belong to.

    def add_layout(self, layout: Layout) -> None:
        """Register a layout. Events of other layouts are refused."""
        self._layouts[layout.fingerprint] = layout
        groups = range(len(layout.groups))
        self._begins_anywhere.update((layout.fingerprint, group) for group in groups if begins_anywhere(layout, group))

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(self._layouts.values())

    @property
    def num_orphans(self) -> int:
        return len(self._missing)

    def digests(self) -> dict[Holding, Digest]:
        """Return the digests at which the index must arrive, without empty holdings. Any thread may call this."""
        return {holding: digest for holding, digest in list(self._digests.items()) if digest != Digest()}

    def check(self, event: Change) -> None:
        """Raise IndexRefusal if the event's layout or group is unknown."""
        self._place(event)

    def apply(self, events: Iterable[Change]) -> list[Announcement]:
        """Apply changes of the pool in order, and return what must be announced.

        Raises:
            IndexRefusal: an event's layout or group is unknown.
        """
        announcements: list[Announcement] = []
        for stored, batch in groupby(events, key=lambda event: isinstance(event, BlocksStored | BlockStored)):
            changed: _Changed = {}
            exact = [announcement for event in batch for announcement in self._apply(event, changed)]
            for holding, hashes in changed.items():
                announcements += self._segments(holding, hashes, stored=stored)
                before, delta = self._digests.get(holding, Digest()), digest_of_hashes(hashes)
                self._digests[holding] = before.plus(delta) if stored else before.minus(delta)
                if not stored:
                    self._drop(holding, hashes)
            # Checkpoints come after the blocks with which they may end.
            announcements += exact
        return announcements

    def everything(self) -> list[Announcement]:
        """Return announcements of everything, for an index that knows nothing of this node."""
        blocks = [
            segment for holding, held in self._held.items() for segment in self._segments(holding, held, stored=True)
        ]
        return [*blocks, *(checkpoint for exact in self._exact.values() for checkpoint in exact.values())]

    def _apply(self, event: Change, changed: _Changed) -> Iterable[Announcement]:
        """Apply one change. Return the announcements that are not made cell by cell."""
        match event:
            case BlockStored():
                return self._store(event, changed)
            case BlockRemoved():
                return self._remove(event, changed)
            case BlocksStored():
                if self._store_run(event, changed):
                    return ()
                return [announcement for block in event.each() for announcement in self._store(block, changed)]
            case BlocksRemoved():
                holding, _ = self._place(event)
                if self._held.get(holding, _NONE).has_all(event.hashes):
                    changed.setdefault(holding, set()).update(event.hashes)
                    return ()
                return [announcement for block in event.each() for announcement in self._remove(block, changed)]

    def _store_run(self, event: BlocksStored, changed: _Changed) -> bool:
        """Store a run of blocks at once; return False if it must be stored block by block."""
        holding, block_tokens = self._place(event)
        are_full = block_tokens and block_tokens == event.block_tokens and not event.num_tokens % block_tokens
        if not are_full or not event.hashes or self._has_orphans(block_tokens, event.hashes):
            return False
        held = self._held_of(holding)
        new = held.lacking(event.hashes)
        ancestry = self._ancestry.setdefault(block_tokens, Ancestry())
        index = event.num_tokens // block_tokens - 1
        if ancestry.knows_all(event.hashes):
            ancestry.use(new)
        elif not ancestry.add_run(
            event.hashes, parent=event.parent, index=index, begins_anywhere=self._may_begin(event)
        ):
            return False
        held.update(new)
        changed.setdefault(holding, set()).update(new)
        return True

    def _held_of(self, holding: Holding) -> ShardedSet:
        held = self._held.get(holding)
        if held is None:
            held = self._held[holding] = ShardedSet()
        return held

    def _has_orphans(self, block_tokens: int, hashes: Iterable[BlockHash]) -> bool:
        """Return whether an orphan waits for one of these blocks."""
        return bool(self._orphans) and any((block_tokens, block_hash) in self._orphans for block_hash in hashes)

    def _place(self, event: Change) -> tuple[Holding, int]:
        """Return the event's holding and its block size, 0 for a state.

        Raises:
            IndexRefusal: the layout or its group is unknown.
        """
        key = (event.layout, event.group, event.tier)
        known = self._places.get(key)
        if known is None:
            layout = self._layouts.get(event.layout)
            if layout is None or not 0 <= event.group < len(layout.groups):
                raise IndexRefusal("unknown_layout", f"no layout {event.layout.hex()} with a group {event.group}")
            group = layout.groups[event.group]
            known = self._places[key] = (Holding(*key), 0 if group.is_state else group.block_tokens)
        return known

    def _block_tokens(self, holding: Holding) -> int:
        return self._places[holding.layout, holding.group, holding.tier][1]

    def _store(self, event: BlockStored, changed: _Changed) -> list[Announcement]:
        holding, block_tokens = self._place(event)
        if not block_tokens or event.num_tokens % block_tokens:
            return self._store_exact(holding, event)
        queue = [event]
        while queue:  # A block may be the missing parent of orphans, which may be parents themselves.
            block = queue.pop()
            if self._link(block, block_tokens):
                self._hold(self._place(block)[0], block.block_hash, block_tokens, changed)
                queue += self._pop_orphans((block_tokens, block.block_hash))
        return []

    def _store_exact(self, holding: Holding, event: BlockStored) -> list[Announcement]:
        exact = self._exact.setdefault(holding, {})
        if event.block_hash in exact:
            return []
        head = self._head_before(holding, event)
        checkpoint = Checkpoint(holding, event.block_hash, event.parent, event.num_tokens, stored=True, head=head)
        exact[event.block_hash] = checkpoint
        self._digests[holding] = self._digests.get(holding, Digest()).plus(digest_of_hash(event.block_hash))
        return [checkpoint]

    def _head_before(self, holding: Holding, event: BlockStored) -> BlockHash | None:
        """Return the head of the cell with the block that a state ends with, if that block is known."""
        layout = self._layouts[holding.layout]
        grid = grid_tokens(layout)
        ancestry = self._ancestry.get(grid)
        is_state = layout.groups[holding.group].is_state
        if not is_state or ancestry is None or event.num_tokens % grid or event.block_hash not in ancestry:
            return None
        return ancestry.head(event.block_hash)

    def _link(self, event: BlockStored, block_tokens: int) -> bool:
        """Give the block its place in its chain; return False if its parent is missing or in another chain."""
        ancestry = self._ancestry.setdefault(block_tokens, Ancestry())
        index = event.num_tokens // block_tokens - 1
        if event.block_hash in ancestry:
            return True
        if event.parent in ancestry:
            if not ancestry.follows(event.parent, index):
                self.num_refused += 1
                return False
        elif index and not self._may_begin(event):
            self._keep_orphan(event, (block_tokens, event.parent))
            return False
        ancestry.add(event.block_hash, parent=event.parent, index=index)
        return True

    def _may_begin(self, event: Change) -> bool:
        """Return whether a chain may begin with this block, inside its prompt."""
        return (event.layout, event.group) in self._begins_anywhere

    def _hold(self, holding: Holding, block_hash: BlockHash, block_tokens: int, changed: _Changed) -> None:
        held = self._held_of(holding)
        if block_hash not in held:
            held.update([block_hash])
            self._ancestry[block_tokens].use([block_hash])
            changed.setdefault(holding, set()).add(block_hash)

    def _remove(self, event: BlockRemoved, changed: _Changed) -> list[Announcement]:
        holding, _ = self._place(event)
        checkpoint = self._exact.get(holding, {}).pop(event.block_hash, None)
        if checkpoint is not None:
            self._digests[holding] = self._digests[holding].minus(digest_of_hash(event.block_hash))
            return [replace(checkpoint, stored=False)]
        if event.block_hash in self._held.get(holding, _NONE):
            changed.setdefault(holding, set()).add(event.block_hash)
        else:
            self._forget_orphan((holding, event.block_hash))
        return []

    def _keep_orphan(self, block: BlockStored, missing: _MissingParent) -> None:
        orphan = (self._place(block)[0], block.block_hash)
        self._forget_orphan(orphan)
        self._missing[orphan] = missing
        self._orphans.setdefault(missing, {})[orphan] = block

    def _pop_orphans(self, missing: _MissingParent) -> Iterable[BlockStored]:
        """Remove and return the orphans that wait for this parent."""
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
        self._held[holding].difference_update(hashes)
        for block_hash in hashes:
            ancestry.release(block_hash)

    def _segments(self, holding: Holding, hashes: Iterable[BlockHash], *, stored: bool) -> Iterator[Segment]:
        """Yield the blocks as one segment per cell and chain, the ends of chains first."""
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
            yield Segment(holding, path[0], b"".join([block[:TAIL_BYTES] for block in path]), bitmap, stored)


def _bitmap(path: list[BlockHash], wanted: set[BlockHash]) -> int:
    """Return a bitmap of the wanted blocks of a path."""
    if wanted.issuperset(path):
        return (1 << len(path)) - 1
    return sum(1 << index for index, block_hash in enumerate(path) if block_hash in wanted)
