"""The order of an engine's numbered batches: what is next, what is known, where one is missing, when the engine is another."""

from __future__ import annotations

from collections import deque
from typing import Literal

import xxhash

_REMEMBERED = 4096  # batches by which a repeated one is told from another engine's

Arrival = Literal["next", "known", "gap", "restart"]


class EventSequence:
    """Judges batches by number and content. Sans-io."""

    def __init__(self) -> None:
        self.last = -1
        self._seen: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)

    def judge(self, number: int, payload: bytes) -> Arrival:
        """What a batch is to what was taken before; changes nothing."""
        if number > self.last:
            return "next" if number == self.last + 1 else "gap"
        digest = xxhash.xxh64_intdigest(payload)
        return "known" if (number, digest) in self._seen else "restart"

    def take(self, number: int, payload: bytes) -> None:
        self.last = number
        self._seen.append((number, xxhash.xxh64_intdigest(payload)))

    def restart(self) -> None:
        """Forget everything: an engine begins at 0."""
        self.last = -1
        self._seen.clear()
