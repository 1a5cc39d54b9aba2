"""Simulated prefix caches of nodes, and the scheduler's view of them. A cache is a real pool without data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prfaas.cachepool.arena import PAGE_BYTES
from prfaas.cachepool.pool import Pool
from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS, NO_HASH
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.pool_events import BlocksStored, PoolChange
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.request import SimulatedRequest
from prfaas.types import AgentName, BlockHash, Shard

# Memory of one slot, which is never touched.
_SLOT_BYTES = PAGE_BYTES


def block_name(number: int) -> BlockHash:
    """Return the block hash for a block's number in the traffic."""
    return BlockHash(number.to_bytes(HASH_BYTES, "little"))


class PrefixCache:
    """Pool of at most `max_blocks` attention blocks of `block_tokens` tokens. `close` frees the pool's memory."""

    def __init__(
        self, block_tokens: int, max_blocks: int, *, on_change: Callable[[PoolChange], None] = lambda _: None
    ) -> None:
        self.block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._pool = Pool(2 * max_blocks * _SLOT_BYTES, on_change=on_change)
        self._arena = self._pool.arena(_layout(block_tokens))

    def match(self, blocks: Sequence[BlockHash]) -> int:
        """Return the cached tokens of a prompt with these blocks, from its start."""
        return _leading(self._pool.find_all(self._arena, 0, blocks)) * self.block_tokens

    def keep(self, blocks: Sequence[BlockHash]) -> None:
        """Use a chain of blocks: touch the cached blocks and store the rest as far as there is room."""
        pool, chain = self._pool, blocks[: self._max_blocks]
        found = pool.find_all(self._arena, 0, chain)
        held = _leading(found)
        lease = pool.open_lease()
        if held:
            pool.pin(self._arena, [slot for slot in found[:held] if slot is not None], lease)
        if held < len(chain):
            slots = pool.allocate(self._arena, 0, len(chain) - held, lease)
            assert slots is not None, "the pool has room for twice `max_blocks`"
            parent, tokens = (chain[held - 1] if held else NO_HASH), (held + 1) * self.block_tokens
            pool.publish_run(self._arena, slots, group=0, hashes=chain[held:], parent=parent, num_tokens=tokens)
        pool.end_lease(lease)

    def close(self) -> None:
        """Free the pool's memory."""
        self._pool.close()


def _leading(found: Sequence[int | None]) -> int:
    return found.index(None) if None in found else len(found)


def _layout(block_tokens: int) -> Layout:
    units = -(-block_tokens // HASH_UNIT_TOKENS) * HASH_UNIT_TOKENS
    layer = LayerSlice("all", 0, _SLOT_BYTES, "uint8", "byte")
    return Layout("simulated", "", Shard(0, 1), (KVGroup("full_attention", units, (layer,)),))


class CacheView:
    """Scheduler's knowledge of which node holds which block."""

    def __init__(self, agents: Sequence[AgentName], block_tokens: int) -> None:
        self._agents = tuple(agents)
        self._block_tokens = block_tokens
        self._bit = {agent: 1 << index for index, agent in enumerate(agents)}
        self._holders: dict[BlockHash, int] = {}

    def apply(self, announced: tuple[AgentName, PoolChange]) -> None:
        """Apply the blocks that a node has stored or removed."""
        agent, change = announced
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
        """Remove all blocks of a node."""
        bit = self._bit[agent]
        self._holders = {block: left for block, holders in self._holders.items() if (left := holders & ~bit)}

    def match(self, blocks: Sequence[BlockHash]) -> dict[AgentName, int]:
        """Return the cached tokens of a prompt on each node, from its start; nodes without any are left out."""
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
    """Tokens per block, and seconds until the scheduler learns of a change."""

    block_tokens: int = 16
    announce_seconds: float = 0.0


class NodeCaches:
    """Caches of all nodes that have room. For a request without blocks, the traffic states the cached tokens."""

    def __init__(self, timeline: Timeline, rules: CacheRules, max_blocks: Mapping[AgentName, int]) -> None:
        self._timeline, self._rules = timeline, rules
        self._view = CacheView(tuple(max_blocks), rules.block_tokens)
        self._max_blocks = max_blocks
        self._caches = {agent: self._empty(agent) for agent, blocks in max_blocks.items() if blocks}

    def _empty(self, agent: AgentName) -> PrefixCache:
        rules, room = self._rules, self._max_blocks[agent]
        changed = partial(self._changed, agent)
        return PrefixCache(rules.block_tokens, room, on_change=changed)

    def _changed(self, agent: AgentName, change: PoolChange) -> None:
        if self._rules.announce_seconds:
            moment = self._timeline.now + self._rules.announce_seconds
            self._timeline.at(moment, self._view.apply, (agent, change))
        else:
            self._view.apply((agent, change))

    def known(self, request: SimulatedRequest) -> dict[AgentName, int]:
        """Return the cached tokens on each node as the scheduler knows them; nodes without any are left out."""
        return self._view.match(request.blocks) if request.blocks else {}

    def usable(self, request: SimulatedRequest, agent: AgentName) -> int:
        """Return the cached tokens that a node really holds; the last token is always computed."""
        if not request.blocks:
            return request.num_cached_tokens
        cache = self._caches.get(agent)
        return min(cache.match(request.blocks), request.num_prompt_tokens - 1) if cache is not None else 0

    def holds(self, agent: AgentName, blocks: Sequence[BlockHash]) -> bool:
        """Return whether a node holds the whole chain."""
        cache = self._caches.get(agent)
        return cache is not None and cache.match(blocks) == len(blocks) * self._rules.block_tokens

    def keep(self, agent: AgentName, blocks: Sequence[BlockHash]) -> None:
        """Use these blocks on a node, which holds them from now on."""
        cache = self._caches.get(agent)
        if blocks and cache is not None:
            cache.keep(blocks)

    def clear(self, agent: AgentName) -> None:
        """Empty a node's cache and the scheduler's view of it."""
        cache = self._caches.get(agent)
        if cache is not None:
            cache.close()
            self._caches[agent] = self._empty(agent)
            self._view.forget(agent)

    def close(self) -> None:
        """Free the memory of all caches."""
        for cache in self._caches.values():
            cache.close()
