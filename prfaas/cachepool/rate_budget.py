"""A budget of bytes per second that may be spent in bursts of a quarter second (pure)."""

from __future__ import annotations

BURST_SECONDS = 0.25


class Bandwidth:
    """Says when the next piece may go. A piece may overdraw the budget; the next one then waits for it."""

    def __init__(self, bytes_per_second: float) -> None:
        """0 bytes per second: no limit."""
        self._bytes_per_second = bytes_per_second
        self._balance = bytes_per_second * BURST_SECONDS
        self._at = 0.0

    def has_room(self, now: float) -> bool:
        """Whether the next piece may go now."""
        earned = (now - self._at) * self._bytes_per_second
        self._balance = min(self._balance + earned, self._bytes_per_second * BURST_SECONDS)
        self._at = now
        return not self._bytes_per_second or self._balance > 0

    def spend(self, num_bytes: int) -> None:
        """A piece goes."""
        self._balance -= num_bytes
