"""What a node's prefix cache holds: the node's own pool, whose slots nobody writes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prfaas.cachepool.eviction import EvictionPolicy
from prfaas.cachepool.pool import Pool
from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS, NO_HASH
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.pool_events import BlocksStored, PoolChange
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.request import SimulatedRequest
from prfaas.types import AgentName, BlockHash, Shard

_SLOT_BYTES = 64  # of memory that is never touched; what a block weighs only ranks it


def block_name(number: int) -> BlockHash:
    """Return the hash of a block that traffic knows by a number."""
    return BlockHash(number.to_bytes(HASH_BYTES, "little"))


class PrefixCache:
    """A pool of at most `max_blocks` attention blocks of `block_tokens` tokens, under one of the pool's own policies.

    Each use stands for itself: nothing is pinned from one to the next. `close` returns what the pool holds of the system.
    """

    def __init__(
        self,
        block_tokens: int,
        max_blocks: int,
        *,
        eviction: EvictionPolicy = "lru",
        on_change: Callable[[PoolChange], None] | None = None,
    ) -> None:
        self.block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._pool = Pool(2 * max_blocks * _SLOT_BYTES, eviction=eviction, on_change=on_change)
        self._arena = self._pool.arena(_layout(block_tokens))

    @property
    def num_blocks(self) -> int:
        """Return how many are here."""
        return self._pool.stats().slots_by_kind["prefix"]

    def match(self, blocks: Sequence[BlockHash]) -> int:
        """Return how many tokens of a prompt with these blocks are here, from its start."""
        return _leading(self._pool.find_all(self._arena, 0, blocks)) * self.block_tokens

    def keep(self, blocks: Sequence[BlockHash]) -> None:
        """Use a chain: what is here is used once more, the rest is stored, as far as there is room."""
        pool, chain = self._pool, blocks[: self._max_blocks]
        found = pool.find_all(self._arena, 0, chain)
        held = _leading(found)
        lease = pool.open_lease("twin")
        if held:
            pool.pin(self._arena, [slot for slot in found[:held] if slot is not None], lease)
        if held < len(chain):
            slots = pool.allocate(self._arena, len(chain) - held, lease)
            assert slots is not None, "the transfer half takes as many blocks as the cache"
            parent, tokens = (chain[held - 1] if held else NO_HASH), (held + 1) * self.block_tokens
            pool.publish_run(self._arena, slots, group=0, hashes=chain[held:], parent=parent, num_tokens=tokens)
        pool.end_lease(lease)

    def close(self) -> None:
        """Give the pool's memory back; nothing is asked of it afterwards."""
        self._pool.close()


def _leading(found: Sequence[int | None]) -> int:
    return found.index(None) if None in found else len(found)


def _layout(block_tokens: int) -> Layout:
    units = -(-block_tokens // HASH_UNIT_TOKENS) * HASH_UNIT_TOKENS
    layer = LayerSlice("all", 0, _SLOT_BYTES, "uint8", "byte")
    return Layout("simulated", "", Shard(0, 1), (KVGroup("full_attention", units, (layer,)),))


class CacheView:
    """Which node holds which block, as far as it has been told."""

    def __init__(self, agents: Sequence[AgentName], block_tokens: int) -> None:
        self._agents = tuple(agents)
        self._block_tokens = block_tokens
        self._bit = {agent: 1 << index for index, agent in enumerate(agents)}
        self._holders: dict[BlockHash, int] = {}

    def apply(self, told: tuple[AgentName, PoolChange]) -> None:
        """Take in what a node has stored or removed."""
        agent, change = told
        bit, holders = self._bit[agent], self._holders
        if isinstance(change, BlocksStored):
            for block in change.hashes:
                holders[block] = holders.get(block, 0) | bit
            return
        for block in change.hashes:
            left = holders.get(block, 0) & ~bit
            if left:
                holders[block] = left
            else:
                holders.pop(block, None)

    def forget(self, agent: AgentName) -> None:
        """Nothing is known any more of what a node holds."""
        bit = self._bit[agent]
        self._holders = {block: left for block, its in self._holders.items() if (left := its & ~bit)}

    def match(self, blocks: Sequence[BlockHash]) -> dict[AgentName, int]:
        """Return how many tokens of a prompt each node holds, from its start; nodes without any are left out."""
        found: dict[AgentName, int] = {}
        holders, with_all = self._holders, -1
        for index, block in enumerate(blocks):
            still = holders.get(block, 0) & with_all
            if still != with_all:
                if index:
                    self._note(found, with_all & ~still, index)
                if not still:
                    return found
                with_all = still
        self._note(found, with_all if blocks else 0, len(blocks))
        return found

    def _note(self, found: dict[AgentName, int], bits: int, num_blocks: int) -> None:
        for agent, bit in self._bit.items():
            if bits & bit:
                found[agent] = num_blocks * self._block_tokens


@dataclass(frozen=True)
class CacheRules:
    """Tokens of a block, what leaves first, and how much later than a change the scheduler knows of it."""

    block_tokens: int = 16
    eviction: EvictionPolicy = "lru"
    announce_seconds: float = 0.0


class NodeCaches:
    """A cache for each node with room for any blocks. A request without blocks has cached what its traffic says."""

    def __init__(self, timeline: Timeline, rules: CacheRules, max_blocks: Mapping[AgentName, int]) -> None:
        self._timeline, self._rules = timeline, rules
        self._view = CacheView(tuple(max_blocks), rules.block_tokens)
        self._max_blocks = max_blocks
        self._caches = {agent: self._empty(agent) for agent, blocks in max_blocks.items() if blocks}

    def _empty(self, agent: AgentName) -> PrefixCache:
        rules, room = self._rules, self._max_blocks[agent]
        changed = partial(self._changed, agent)
        return PrefixCache(rules.block_tokens, room, eviction=rules.eviction, on_change=changed)

    def _changed(self, agent: AgentName, change: PoolChange) -> None:
        if self._rules.announce_seconds:
            moment = self._timeline.now + self._rules.announce_seconds
            self._timeline.at(moment, self._view.apply, (agent, change))
        else:
            self._view.apply((agent, change))

    def known(self, request: SimulatedRequest) -> dict[AgentName, int]:
        """Return the prefix that each node is said to hold, in tokens; nodes without any are left out."""
        return self._view.match(request.blocks) if request.blocks else {}

    def usable(self, request: SimulatedRequest, agent: AgentName) -> int:
        """Return the prefix that a node does hold; the last token is always computed."""
        if not request.blocks:
            return request.num_cached_tokens
        cache = self._caches.get(agent)
        return min(cache.match(request.blocks), request.num_prompt_tokens - 1) if cache is not None else 0

    def keep(self, agent: AgentName, blocks: Sequence[BlockHash]) -> None:
        """A node uses these blocks, and holds them from here on."""
        cache = self._caches.get(agent)
        if blocks and cache is not None:
            cache.keep(blocks)

    def clear(self, agent: AgentName) -> None:
        """A node has lost everything, and nobody is said to hold it there."""
        cache = self._caches.get(agent)
        if cache is not None:
            cache.close()
            self._caches[agent] = self._empty(agent)
            self._view.forget(agent)

    def close(self) -> None:
        """Give all memory back."""
        for cache in self._caches.values():
            cache.close()
