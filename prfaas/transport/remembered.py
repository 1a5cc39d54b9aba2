"""How ended transfers ended: what a late OPEN or chunk is answered (pure)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Remembered(Generic[T]):
    """The latest answers, by peer and transfer: beyond the limit whoever has most loses its oldest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._of: dict[str, OrderedDict[bytes, T]] = {}

    def get(self, peer: str, transfer_id: bytes) -> T | None:
        its = self._of.get(peer)
        return None if its is None else its.get(transfer_id)

    def put(self, peer: str, transfer_id: bytes, answer: T) -> None:
        its = self._of.setdefault(peer, OrderedDict())
        self._count += transfer_id not in its
        its[transfer_id] = answer
        if self._count > self._limit:
            self._forget_one()

    def _forget_one(self) -> None:
        most = max(self._of, key=lambda peer: len(self._of[peer]))
        self._of[most].popitem(last=False)
        self._count -= 1
        if not self._of[most]:
            del self._of[most]
