"""The prefix caches of all nodes: what each holds, and what the scheduler has heard of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prfaas.cachepool.eviction import EvictionPolicy
from prfaas.events import PoolChange
from prfaas.sim.cache_view import CacheView
from prfaas.sim.prefix_cache import PrefixCache
from prfaas.sim.request import Request
from prfaas.sim.timeline import Timeline
from prfaas.types import AgentName, BlockHash


@dataclass(frozen=True)
class CacheRules:
    """Tokens of a block, what leaves first, and how much later than a change the scheduler knows of it."""

    block_tokens: int = 16
    eviction: EvictionPolicy = "lru"
    announce_seconds: float = 0.0


class Caches:
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

    def known(self, request: Request) -> dict[AgentName, int]:
        """The prefix that each node is said to hold, in tokens; nodes without any are left out."""
        return self._view.match(request.blocks) if request.blocks else {}

    def usable(self, request: Request, agent: AgentName) -> int:
        """The prefix that a node does hold; the last token is always computed."""
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
