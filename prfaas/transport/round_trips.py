"""Which of its connections' round trips a link goes by (pure).

A kernel's mean moves by an eighth with each acknowledgement: on a connection that falls idle it stays where the last burst left
it. So only those count that have heard enough of them since they were idle. Connections may take unlike ways, of which each is
compared with its own least.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)
FRESH_SEGMENTS = 16  # heard: after so many, twelve times the least has come down to two and a half
RTT_INFLATION = 2.5  # over the smallest round trip
RTT_RISE_SECONDS = 0.005  # and by at least so much: within a datacenter a busy host alone multiplies a round trip


class RoundTrip(NamedTuple):
    """Of one connection, at present and at least; 0: not known."""

    seconds: float = 0.0
    min_seconds: float = 0.0

    @property
    def pressure(self) -> float:
        """Its share of what a way without a queue takes at most."""
        return self.seconds / max(RTT_INFLATION * self.min_seconds, self.min_seconds + RTT_RISE_SECONDS)

    @property
    def is_long(self) -> bool:
        """Whether something waits on the way."""
        return self.min_seconds > 0 and self.pressure > 1


class RoundTrips(Generic[T]):
    """Of one link; its connections are named by whatever the caller has for them."""

    def __init__(self) -> None:
        self._fresh: dict[T, int] = {}  # segments that each has heard since it was idle

    def heard(self, num_segments: Mapping[T, int], *, in_flight: Sequence[T]) -> None:
        """How many each has heard since this was called last, and on which something is under way."""
        busy = {line for line, count in num_segments.items() if count} | set(in_flight)
        self._fresh = {line: self._fresh.get(line, 0) + num_segments.get(line, 0) for line in busy}

    def of(self, known: Mapping[T, RoundTrip]) -> RoundTrip:
        """That which has risen most, of those that are measured at present; where none is, the least there ever was."""
        fresh = [its for line, its in known.items() if self._fresh.get(line, 0) >= FRESH_SEGMENTS]
        if fresh:
            return max(fresh, key=lambda its: its.pressure)
        least = min((its.min_seconds for its in known.values()), default=0.0)
        return RoundTrip(least, least)
