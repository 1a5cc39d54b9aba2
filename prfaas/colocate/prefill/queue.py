"""The requests of the prefill process: pending_kv until decode has sent blocks, then waiting_prefill, first come first served.

The order is decode's, which gives blocks in the order of arrival. A request and its blocks come over different rings,
so either may be first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from prfaas.colocate.processes.messages import Request


@dataclass(frozen=True)
class Prompt:
    """Inputs of prefill for one request. Prefill writes only to these blocks and this state slot.

    Blocks and slot hold the first `num_cached` tokens already.
    """

    request: Request
    slot: int
    blocks: tuple[int, ...]
    num_cached: int = 0


class PrefillQueue:
    """Mutable; one owner, the prefill loop."""

    def __init__(self) -> None:
        self._pending_kv: dict[int, Request] = {}
        self._waiting: deque[tuple[int, int, int, tuple[int, ...]]] = deque()
        self._dropped: set[int] = set()
        self._newest = -1

    def add(self, request: Request) -> None:
        self._newest = max(self._newest, request.request)
        if request.request in self._dropped:
            self._dropped.remove(request.request)
        else:
            self._pending_kv[request.request] = request

    def blocks(self, request: int, slot: int, blocks: list[int], *, num_cached: int = 0) -> None:
        """Decode's blocks for a request: from pending_kv to waiting_prefill."""
        self._waiting.append((request, slot, num_cached, tuple(blocks)))

    def drop(self, request: int) -> bool:
        """Forget a request; False when it is not here any more, so that its PREFILLED is the answer."""
        if request in self._pending_kv:
            del self._pending_kv[request]
        elif request > self._newest:  # Ids ascend, so the request's tokens are still on the way.
            self._dropped.add(request)
        else:
            return False
        self._waiting = deque(entry for entry in self._waiting if entry[0] != request)
        return True

    def next(self) -> Prompt | None:
        """Return the next prompt in decode's order, taken off; None while its tokens or its blocks have not come."""
        if not self._waiting or self._waiting[0][0] not in self._pending_kv:
            return None
        request, slot, num_cached, blocks = self._waiting.popleft()
        return Prompt(self._pending_kv.pop(request), slot, blocks, num_cached)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)
