"""Which KV blocks and state slots are free. Decode alone keeps it, so no lock is needed (RAPID-Serve, section 4.5.1)."""

from __future__ import annotations

from collections import deque

from prfaas.colocate.cache import CacheShape


class FreeList:
    """Free block ids and state slots; 0 of each is scratch and never given away."""

    def __init__(self, shape: CacheShape) -> None:
        self._blocks = deque(range(1, shape.num_blocks))
        self._slots = deque(range(1, shape.num_state_slots))

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def take_blocks(self, number: int) -> list[int] | None:
        """`number` blocks, or None, and then none is taken."""
        if number > len(self._blocks):
            return None
        return [self._blocks.popleft() for _ in range(number)]

    def take_slot(self) -> int:
        return self._slots.popleft()

    def give_back(self, blocks: list[int], slot: int) -> None:
        self._blocks.extend(blocks)
        self._slots.append(slot)
