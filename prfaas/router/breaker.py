"""The circuit breaker of one endpoint: after failures on end nobody asks it for a while, then one request tries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Breaker:
    """Times are seconds on a clock that only goes forward. `limit` failures on end open it; 0: nothing does."""

    limit: int = 0
    seconds: float = 0.0
    failures: int = 0  # on end
    closed_at: float = 0.0  # before this it is open

    def is_open(self, now: float) -> bool:
        return now < self.closed_at

    def succeeded(self) -> None:
        """A request was answered."""
        self.failures, self.closed_at = 0, 0.0

    def failed(self, now: float) -> bool:
        """A request was not; whether that opened it. Once it was open, the next failure opens it again."""
        self.failures += 1
        if not self.limit or self.failures < self.limit or self.is_open(now):
            return False
        self.closed_at = now + self.seconds
        return True
