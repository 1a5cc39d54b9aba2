"""What this node holds of one layout, in memory or on its SSD."""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.ssd import Ssd
from prfaas.types import BlockHash


class Holdings:
    """Answers for one moment: it is asked and forgotten."""

    def __init__(self, pool: Pool, ssd: Ssd | None, arena: Arena) -> None:
        self._pool = pool
        self._ssd = ssd
        self.arena = arena

    def has(self, group: int, block_hash: BlockHash) -> bool:
        return self.have(group, [block_hash])[0]

    def have(self, group: int, hashes: Sequence[BlockHash]) -> list[bool]:
        """Of each block whether it is held."""
        found = [slot is not None for slot in self._pool.find_all(self.arena, group, hashes)]
        if self._ssd is None or all(found):
            return found
        below = self._ssd.holds(self.arena.layout, group, hashes)
        return [above or its for above, its in zip(found, below, strict=True)]

    def parent(self, group: int, block_hash: BlockHash) -> BlockHash | None:
        """The parent of a block, when it is held."""
        slot = self._pool.find(self.arena, group, block_hash)
        if slot is not None:
            return self._pool.identity(self.arena, slot).parent
        below = None if self._ssd is None else self._ssd.identity(self.arena.layout, group, block_hash)
        return None if below is None else below.parent

    def states_after(self, group: int, unit: BlockHash) -> dict[BlockHash, int]:
        """As `Pool.states_after`."""
        found = self._pool.states_after(self.arena, group, unit)
        return found if self._ssd is None else self._ssd.states_after(self.arena.layout, group, unit) | found
