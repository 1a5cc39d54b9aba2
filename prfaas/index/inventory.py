"""What one node holds, as its agent knows it: pool events in, announcements and digests out.

An event names a block by its hash and its parent; the index wants a path from the head of the block's cell. The
inventory remembers the parent of every block that is held or that a held block descends from, so that the path can be
told at any time, also when everything is announced anew. A block whose parent was never seen is an orphan: it is kept
apart and announced when its parent appears.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from prfaas.cachepool.layout import Layout
from prfaas.errors import IndexRefusal
from prfaas.events import BlockRemoved, BlockStored, PoolEvent, Tier
from prfaas.index.segments import (
    CELL_BLOCKS,
    TAIL_BYTES,
    Announcement,
    Checkpoint,
    Digest,
    Holding,
    Segment,
    digest_of_hash,
    digest_of_hashes,
)
from prfaas.types import BlockHash


@dataclass(slots=True)
class _Link:
    """A block's place in its chain. It lives as long as somebody holds the block or descends from it."""

    parent: BlockHash | None  # None for the first block of a chain
    index: int
    num_users: int = 0  # holdings and children


class Inventory:
    """All prefix blocks of one node's pool."""

    def __init__(self) -> None:
        self._layouts: dict[bytes, Layout] = {}
        self._places: dict[tuple[bytes, int, Tier], tuple[Holding, int]] = {}
        self._links: dict[int, dict[BlockHash, _Link]] = {}  # by block size
        self._held: dict[Holding, set[BlockHash]] = {}
        self._exact: dict[Holding, dict[BlockHash, Checkpoint]] = {}
        self._orphans: dict[tuple[int, BlockHash], list[BlockStored]] = {}  # by block size and missing parent
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
        return sum(len(waiting) for waiting in self._orphans.values())

    def digests(self) -> dict[Holding, Digest]:
        """Per holding with anything in it; what the index must arrive at. Any thread may ask."""
        return {holding: digest for holding, digest in list(self._digests.items()) if digest != Digest()}

    def check(self, event: PoolEvent) -> None:
        """Raises:
        IndexRefusal: the event's layout or group is unknown.
        """
        self._place(event)

    def apply(self, events: Iterable[PoolEvent]) -> list[Announcement]:
        """Take changes of the pool in order; returns what to announce of them.

        Raises:
            IndexRefusal: an event's layout or group is unknown.
        """
        announcements: list[Announcement] = []
        for stored, batch in groupby(events, key=lambda event: isinstance(event, BlockStored)):
            fresh: dict[Holding, set[BlockHash]] = {}
            for event in batch:
                announcements += (
                    self._store(event, fresh) if isinstance(event, BlockStored) else self._remove(event, fresh)
                )
            for holding, hashes in fresh.items():
                announcements += self._segments(holding, hashes, stored=stored)
                before, changed = self._digests.get(holding, Digest()), digest_of_hashes(hashes)
                self._digests[holding] = before.plus(changed) if stored else before.minus(changed)
                if not stored:
                    self._drop(holding, hashes)
        return announcements

    def everything(self) -> list[Announcement]:
        """All that is held, as announcements to an index that knows nothing of this node."""
        blocks = [
            segment for holding, held in self._held.items() for segment in self._segments(holding, held, stored=True)
        ]
        return [*blocks, *(its for exact in self._exact.values() for its in exact.values())]

    def _place(self, event: PoolEvent) -> tuple[Holding, int]:
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
        return 0 if group.kind == "linear_state" else group.block_tokens

    def _store(self, event: BlockStored, fresh: dict[Holding, set[BlockHash]]) -> list[Announcement]:
        holding, block_tokens = self._place(event)
        if not block_tokens or event.num_tokens % block_tokens:
            return self._store_exact(holding, event)
        waiting = [event]
        while waiting:  # a block may be the missing parent of others, and those of others again
            block = waiting.pop()
            if self._link(block, block_tokens):
                self._hold(self._place(block)[0], block.block_hash, block_tokens, fresh)
                waiting += self._orphans.pop((block_tokens, block.block_hash), [])
        return []

    def _store_exact(self, holding: Holding, event: BlockStored) -> list[Announcement]:
        its = Checkpoint(holding, event.block_hash, event.parent, event.num_tokens, stored=True)
        exact = self._exact.setdefault(holding, {})
        if event.block_hash in exact:
            return []
        exact[event.block_hash] = its
        self._digests[holding] = self._digests.get(holding, Digest()).plus(digest_of_hash(event.block_hash))
        return [its]

    def _link(self, event: BlockStored, block_tokens: int) -> bool:
        """Give the block its place in its chain; False when its parent is missing or is not where it should be."""
        links = self._links.setdefault(block_tokens, {})
        index = event.num_tokens // block_tokens - 1
        parent = links.get(event.parent)
        if event.block_hash in links:
            return True
        if index and parent is None:
            self._orphans.setdefault((block_tokens, event.parent), []).append(event)
            return False
        if parent is not None and parent.index != index - 1:
            self.num_refused += 1
            return False
        links[event.block_hash] = _Link(event.parent if index else None, index)
        if parent is not None:
            parent.num_users += 1
        return True

    def _hold(
        self, holding: Holding, block_hash: BlockHash, block_tokens: int, fresh: dict[Holding, set[BlockHash]]
    ) -> None:
        held = self._held.setdefault(holding, set())
        if block_hash in held:
            return
        held.add(block_hash)
        self._links[block_tokens][block_hash].num_users += 1
        fresh.setdefault(holding, set()).add(block_hash)

    def _remove(self, event: BlockRemoved, fresh: dict[Holding, set[BlockHash]]) -> list[Announcement]:
        holding, block_tokens = self._place(event)
        its = self._exact.get(holding, {}).pop(event.block_hash, None)
        if its is not None:
            self._digests[holding] = self._digests[holding].minus(digest_of_hash(event.block_hash))
            return [replace(its, stored=False)]
        if event.block_hash in self._held.get(holding, ()):
            fresh.setdefault(holding, set()).add(event.block_hash)
        else:
            self._forget_orphan(holding, event.block_hash, block_tokens)
        return []

    def _forget_orphan(self, holding: Holding, block_hash: BlockHash, block_tokens: int) -> None:
        for key, waiting in list(self._orphans.items()):
            if key[0] == block_tokens:
                kept = [
                    its
                    for its in waiting
                    if (its.block_hash, Holding(its.layout, its.group, its.tier)) != (block_hash, holding)
                ]
                self._orphans[key] = kept
                if not kept:
                    del self._orphans[key]

    def _drop(self, holding: Holding, hashes: set[BlockHash]) -> None:
        links = self._links[self._block_tokens(holding)]
        held = self._held[holding]
        for block_hash in hashes:
            held.discard(block_hash)
            _release(links, block_hash)

    def _segments(self, holding: Holding, hashes: Iterable[BlockHash], *, stored: bool) -> Iterator[Segment]:
        """The blocks as segments: one per cell and chain, deepest first."""
        links = self._links.get(self._block_tokens(holding), {})
        remaining = set(hashes)
        for block_hash in sorted(remaining, key=lambda its: links[its].index, reverse=True):
            if block_hash not in remaining:
                continue
            path = _path(links, block_hash)
            bitmap = sum(1 << index for index, its in enumerate(path) if its in remaining)
            remaining.difference_update(path)
            yield Segment(holding, path[0], b"".join([its[:TAIL_BYTES] for its in path]), bitmap, stored)


def _path(links: dict[BlockHash, _Link], block_hash: BlockHash) -> list[BlockHash]:
    """The chain from the head of the block's cell to the block."""
    path = [block_hash]
    link = links[block_hash]
    while link.index % CELL_BLOCKS:
        assert link.parent is not None, "only the first block of a chain has no parent, and it is a head"
        path.append(link.parent)
        link = links[link.parent]
    return path[::-1]


def _release(links: dict[BlockHash, _Link], block_hash: BlockHash | None) -> None:
    """One user less; a link without users goes, and with it its use of its parent."""
    while block_hash is not None:
        link = links[block_hash]
        link.num_users -= 1
        if link.num_users:
            return
        del links[block_hash]
        block_hash = link.parent
