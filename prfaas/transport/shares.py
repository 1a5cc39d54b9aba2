"""How much each peer has of what is bounded over all of them (pure)."""

from __future__ import annotations

from collections import Counter


class Shares:
    """A bounded good. Its last quarter is for peers that have less than a quarter, so that none takes it from the others."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._total = 0
        self._of: Counter[str] = Counter()

    def has_room(self, peer: str, amount: int = 1) -> bool:
        """Whether a peer may have so much more."""
        total, own = self._total + amount, self._of[peer] + amount
        return total <= self.limit and (total <= self.limit * 3 // 4 or own <= self.limit // 4)

    def change(self, peer: str, amount: int) -> None:
        """A peer has so much more, or less."""
        self._total += amount
        self._of[peer] += amount
        if not self._of[peer]:
            del self._of[peer]
