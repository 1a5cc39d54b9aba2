"""Parked requests, for which vLLM can skip the lookup in its own prefix cache.

vLLM asks for a parked request in every step, and looks up its prefix before: 0.4 µs per block. So between two steps a
waiting request is marked as one that reads no prefix cache. The mark goes when the wait ends, and at the latest when vLLM
asks for the request. That is before vLLM would schedule it; the answer is "not yet" once more, since nothing was looked up.
"""

from collections.abc import Callable
from typing import Any


class ParkedRequests:
    """All parked requests of one engine, as vLLM's objects."""

    def __init__(self) -> None:
        self._parked: dict[str, Any] = {}  # Parked in the present step.
        self._marked: dict[str, Any] = {}

    def __bool__(self) -> bool:
        """Return whether any request is marked."""
        return bool(self._marked)

    def wake(self, request: Any) -> bool:
        """Remove the mark of a request that the engine asks for; return whether it had one."""
        if self._marked.pop(request.request_id, None) is None:
            return False
        request.skip_reading_prefix_cache = False
        return True

    def park(self, request: Any) -> None:
        """Add a request whose prefix lookup has answered "not yet"."""
        self._parked[request.request_id] = request

    def mark(self, waits: Callable[[str], bool]) -> None:
        """After planning a step, mark the requests parked in it that wait."""
        for request_id, request in self._parked.items():
            if waits(request_id):
                request.skip_reading_prefix_cache = True
                self._marked[request_id] = request
        self._parked.clear()

    def unmark(self, waits: Callable[[str], bool]) -> None:
        """After a step, unmark the requests whose wait has ended."""
        for request in [request for request_id, request in self._marked.items() if not waits(request_id)]:
            self.wake(request)

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended."""
        self._parked.pop(request_id, None)
        self._marked.pop(request_id, None)
