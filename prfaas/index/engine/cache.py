"""Contents of one engine's device cache as block hashes: vLLM's events in, events of the tier "gpu" out.

vLLM's own hashes end here. A block's tokens and its known parent give its block hash. Some events do not tell which
blocks they mean: those of windows and states have fewer hashes than blocks, and a loaded window begins behind blocks that
only full attention has. vLLM hashes a prefix alike in every KV group, so an event of another group, earlier or later in
the batch, teaches their places. A salt is the tenant. A block with other extra keys, without tokens or without a known
parent is an orphan. It is counted and never announced, and neither is anything that follows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from prfaas.hashing import HASH_UNIT_TOKENS, HashChain, root_hash
from prfaas.index.engine.events import EngineEvent, EngineHash, EngineRemoved, EngineStored
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.pool_events import BlockRemoved, BlockStored, PoolEvent
from prfaas.types import BlockHash, InstanceId

OrphanReason = Literal["extras", "tokens", "parent", "layout"]


def gpu_layout(layout: Layout, instance: InstanceId) -> Layout:
    """Return the layout of an engine's own memory, whose blocks serve only that engine and never add up with others."""
    return replace(layout, packing=f"{layout.packing}; in {instance}")


@dataclass(frozen=True, slots=True)
class _ChainPosition:
    """Place of a block in its hash chain: it ends at `num_tokens` and begins at the hash `parent`."""

    block_hash: BlockHash
    parent: BlockHash
    num_tokens: int
    block_tokens: int


class EngineCache:
    """One engine's cache as its events tell it. It does no I/O: `apply` returns the events to publish."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        """Take one layout per rank, each from `gpu_layout`."""
        self.orphans: Counter[OrphanReason] = Counter()
        self._layouts = tuple(layouts)
        self._groups: tuple[KVGroup, ...] = layouts[0].groups
        self._model = layouts[0].model
        self._places: dict[EngineHash, _ChainPosition] = {}
        self._uses: Counter[EngineHash] = Counter()  # Groups that hold a hash; its place is forgotten with the last.
        self._held: dict[tuple[int, EngineHash], _ChainPosition] = {}

    def __len__(self) -> int:
        return len(self._held)

    def apply(self, events: Iterable[EngineEvent]) -> list[PoolEvent]:
        """Apply a batch in order, and return the changes as pool events."""
        changes: list[PoolEvent] = []
        untaught: list[tuple[int, EngineHash]] = []  # Blocks whose places a later event may teach.
        for event in events:
            if isinstance(event, EngineStored):
                changes += self._store(event, untaught)
            elif isinstance(event, EngineRemoved):
                changes += self._remove(event, untaught)
            else:
                untaught.clear()
                changes += self.clear()
        for group, engine_hash in untaught:
            changes += self._hold_taught(group, engine_hash)
        return changes

    def clear(self) -> list[PoolEvent]:
        """Remove everything: the engine cleared its cache, stopped, or sent events that were lost."""
        gone = [event for group, engine_hash in list(self._held) for event in self._drop(group, engine_hash)]
        self._places.clear()
        self._uses.clear()
        return gone

    def _store(self, event: EngineStored, untaught: list[tuple[int, EngineHash]]) -> Iterator[PoolEvent]:
        group = self._group(event.group)
        reason = self._orphan_reason(event, group)
        if group is None or reason not in (None, "parent"):
            self.orphans[reason or "layout"] += len(event.hashes)
        elif reason is None and len(event.token_ids) == len(event.hashes) * event.block_tokens:
            for engine_hash, place in zip(event.hashes, self._places_of(event), strict=True):
                self._places.setdefault(engine_hash, place)
                yield from self._hold(group, engine_hash, place)
        else:
            untaught += [(group, engine_hash) for engine_hash in event.hashes]

    def _group(self, stated: int | None) -> int | None:
        """Return the layout's group; an engine that states none has a single group."""
        group = 0 if stated is None and len(self._groups) == 1 else stated
        return group if group is not None and 0 <= group < len(self._groups) else None

    def _orphan_reason(self, event: EngineStored, group: int | None) -> OrphanReason | None:
        if group is None or not self._fits(event.block_tokens, group):
            return "layout" if event.block_tokens else "tokens"
        if event.has_extras:
            return "extras"
        if not event.token_ids:
            return "tokens"
        return "parent" if event.parent is not None and event.parent not in self._places else None

    def _fits(self, block_tokens: int, group: int) -> bool:
        known = self._groups[group]
        if block_tokens <= 0 or block_tokens % HASH_UNIT_TOKENS:
            return False
        return known.is_state or block_tokens == known.block_tokens

    def _places_of(self, event: EngineStored) -> list[_ChainPosition]:
        """Return the places of an event that names all its blocks."""
        first = self._places[event.parent] if event.parent is not None else None
        parent, start = (
            (first.block_hash, first.num_tokens) if first else (root_hash(self._model, event.salt.encode()), 0)
        )
        step = event.block_tokens // HASH_UNIT_TOKENS
        ends = [parent, *HashChain(parent, event.token_ids).units[step - 1 :: step]]
        return [
            _ChainPosition(ends[index + 1], ends[index], start + (index + 1) * event.block_tokens, event.block_tokens)
            for index in range(len(event.hashes))
        ]

    def _hold_taught(self, group: int, engine_hash: EngineHash) -> Iterator[PoolEvent]:
        place = self._places.get(engine_hash)
        if place is None:
            self.orphans["parent"] += 1
        elif not self._fits(place.block_tokens, group):
            self.orphans["layout"] += 1
        else:
            yield from self._hold(group, engine_hash, place)

    def _hold(self, group: int, engine_hash: EngineHash, place: _ChainPosition) -> Iterator[PoolEvent]:
        if (group, engine_hash) in self._held:
            return
        self._held[group, engine_hash] = place
        self._uses[engine_hash] += 1
        parent = place.block_hash if self._groups[group].is_state else place.parent
        for layout in self._layouts:
            yield BlockStored(layout.fingerprint, group, place.block_hash, parent, place.num_tokens, "gpu")

    def _remove(self, event: EngineRemoved, untaught: list[tuple[int, EngineHash]]) -> Iterator[PoolEvent]:
        group = self._group(event.group)
        if group is None:
            return
        for engine_hash in event.hashes:
            if (group, engine_hash) in untaught:
                untaught.remove((group, engine_hash))
            yield from self._drop(group, engine_hash)

    def _drop(self, group: int, engine_hash: EngineHash) -> Iterator[PoolEvent]:
        place = self._held.pop((group, engine_hash), None)
        if place is None:
            return
        self._uses[engine_hash] -= 1
        if not self._uses[engine_hash]:
            del self._uses[engine_hash]
            self._places.pop(engine_hash, None)
        for layout in self._layouts:
            yield BlockRemoved(layout.fingerprint, group, place.block_hash, "gpu")
