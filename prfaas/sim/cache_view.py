"""What the index knows of every node's cache, a given time after it came to be."""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.events import BlocksStored, PoolChange
from prfaas.types import AgentName, BlockHash


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
        """How many tokens of a prompt each node holds, from its start; nodes without any are left out."""
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
