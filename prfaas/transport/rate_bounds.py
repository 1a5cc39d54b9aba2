"""Between which rates a link's own lies, by what was handed to its connections and what of that has landed (pure).

What landed since a moment, of what was handed over since then, the link has carried: its rate is no less. While the oldest
bytes under way are half a second late the link had something to carry all that time: its rate is no more than what landed in
it, what waits at the peer behind a lost segment, and what is moving now. Both hold whatever lies between: a kernel's send
buffer or a proxy takes megabytes at once, and says nothing of the way behind it.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

BEHIND_SECONDS = 0.5  # later than a round trip: no queue that a well filled link needs is so long
SPAN_SECONDS = 1.0  # over which the lower bound is taken while the link never falls idle
SHORTEST_SECONDS = 0.05  # bytes that land together say no more than that they took less than this


class _Handed(NamedTuple):
    """Bytes under way, and how many had been handed over and had landed before them."""

    at: float
    num_bytes: int
    handed_bytes: int
    landed_bytes: int


class RateBounds:
    """Of one link, in bytes per second of payload. Bytes count as landing in the order in which they were handed over."""

    def __init__(self) -> None:
        self._handed_bytes = 0
        self._landed_bytes = 0
        self._under_way: deque[_Handed] = deque()
        self._span_at, self._span_bytes = 0.0, 0  # since when the lower bound is taken, and what was handed over before
        self._least = 0.0

    def handed(self, num_bytes: int, *, now: float) -> None:
        """A connection takes so many bytes."""
        if not self._under_way:
            self._begin_span(now)
        self._under_way.append(_Handed(now, num_bytes, self._handed_bytes, self._landed_bytes))
        self._handed_bytes += num_bytes

    def _begin_span(self, now: float) -> None:
        self._span_at, self._span_bytes = now, self._handed_bytes

    def landed(self, num_bytes: int, *, rtt_seconds: float, now: float) -> None:
        """The peer acknowledges so many bytes."""
        self._landed_bytes = min(self._landed_bytes + num_bytes, self._handed_bytes)
        while self._under_way and self._under_way[0].handed_bytes + self._under_way[0].num_bytes <= self._landed_bytes:
            self._under_way.popleft()
        seconds = now - self._span_at
        carried = (self._landed_bytes - self._span_bytes) / max(SHORTEST_SECONDS, seconds - rtt_seconds)
        self._least = max(self._least, carried)
        if carried >= 0 and seconds >= SPAN_SECONDS:
            self._begin_span(now)

    def restart(self, num_bytes: int, *, now: float) -> None:
        """A connection was lost; so many bytes are under way on the others."""
        self._handed_bytes = self._landed_bytes
        self._under_way.clear()
        if num_bytes:
            self.handed(num_bytes, now=now)
        self._begin_span(now)

    def take_least(self) -> float:
        """The highest lower bound since this was asked last; 0 when nothing landed."""
        least, self._least = self._least, 0.0
        return least

    def most(self, *, rtt_seconds: float, num_connections: int, now: float, out_of_order_bytes: int = 0) -> float:
        """The upper bound; infinite while nothing is late. `out_of_order_bytes` have been carried and have not landed."""
        oldest = self._under_way[0] if self._under_way else None
        seconds = now - oldest.at - rtt_seconds if oldest else 0.0
        if oldest is None or seconds < BEHIND_SECONDS:
            return math.inf
        under_way = self._handed_bytes - self._landed_bytes
        not_landed = min(under_way, out_of_order_bytes + oldest.num_bytes * num_connections)
        return (self._landed_bytes - oldest.landed_bytes + not_landed) / seconds
