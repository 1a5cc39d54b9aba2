"""What one engine holds on its device, as our own hashes: vLLM's events in, events of the tier "gpu" out.

vLLM's hashes end here. The tokens of a block that follows on a known one give its hash in our chain. An event with
fewer hashes than blocks (windows, states) does not say which blocks it means, and one of a window that a connector has
loaded begins behind blocks that only full attention has; vLLM hashes a prefix alike in every KV group, so the place that
another group's event teaches, here or later in its batch, does. A salt is the tenant. A block with other extra keys,
without tokens or without a known parent is an orphan: counted, never announced, and so is all that follows on it.
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
    """Under which an engine's own memory is announced: its blocks serve that engine and never add up with others."""
    return replace(layout, packing=f"{layout.packing}; in {instance}")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a block stands in our chain: it ends at `num_tokens`, and `parent` is our hash where it begins."""

    block_hash: BlockHash
    parent: BlockHash
    num_tokens: int
    block_tokens: int


class EngineCache:
    """One engine's cache as far as its events tell. Sans-io: `apply` returns what to publish."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        """`layouts` are one per rank, from `gpu_layout`."""
        self.orphans: Counter[OrphanReason] = Counter()
        self._layouts = tuple(layouts)
        self._groups: tuple[KVGroup, ...] = layouts[0].groups
        self._model = layouts[0].model
        self._places: dict[EngineHash, _Place] = {}
        self._uses: Counter[EngineHash] = Counter()  # groups that hold it: with the last one its place is forgotten
        self._held: dict[tuple[int, EngineHash], _Place] = {}

    def __len__(self) -> int:
        return len(self._held)

    def apply(self, events: Iterable[EngineEvent]) -> list[PoolEvent]:
        """Take a batch in order; returns the changes in our words."""
        changes: list[PoolEvent] = []
        untaught: list[tuple[int, EngineHash]] = []  # a group's event may come before the one that teaches its places
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
        """Nothing is held any more: the engine says so, is gone, or has said things that are lost."""
        gone = [event for group, engine_hash in list(self._held) for event in self._drop(group, engine_hash)]
        self._places.clear()
        self._uses.clear()
        return gone

    def _store(self, event: EngineStored, untaught: list[tuple[int, EngineHash]]) -> Iterator[PoolEvent]:
        group = self._group(event.group)
        reason = self._why_orphan(event, group)
        if group is None or reason not in (None, "parent"):
            self.orphans[reason or "layout"] += len(event.hashes)
        elif reason is None and len(event.token_ids) == len(event.hashes) * event.block_tokens:
            for engine_hash, place in zip(event.hashes, self._placed(event), strict=True):
                self._places.setdefault(engine_hash, place)
                yield from self._hold(group, engine_hash, place)
        else:
            untaught += [(group, engine_hash) for engine_hash in event.hashes]

    def _group(self, stated: int | None) -> int | None:
        """The layout's group; an engine that states none has a single one."""
        group = 0 if stated is None and len(self._groups) == 1 else stated
        return group if group is not None and 0 <= group < len(self._groups) else None

    def _why_orphan(self, event: EngineStored, group: int | None) -> OrphanReason | None:
        if group is None or not self._fits(event.block_tokens, group):
            return "layout" if event.block_tokens else "tokens"
        if event.has_extras:
            return "extras"
        if not event.token_ids:
            return "tokens"
        return "parent" if event.parent is not None and event.parent not in self._places else None

    def _fits(self, block_tokens: int, group: int) -> bool:
        its = self._groups[group]
        if block_tokens <= 0 or block_tokens % HASH_UNIT_TOKENS:
            return False
        return its.is_state or block_tokens == its.block_tokens

    def _placed(self, event: EngineStored) -> list[_Place]:
        """The places of an event that names all its blocks."""
        first = self._places[event.parent] if event.parent is not None else None
        parent, start = (
            (first.block_hash, first.num_tokens) if first else (root_hash(self._model, event.salt.encode()), 0)
        )
        step = event.block_tokens // HASH_UNIT_TOKENS
        ends = [parent, *HashChain(parent, event.token_ids).units[step - 1 :: step]]
        return [
            _Place(ends[index + 1], ends[index], start + (index + 1) * event.block_tokens, event.block_tokens)
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

    def _hold(self, group: int, engine_hash: EngineHash, place: _Place) -> Iterator[PoolEvent]:
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
