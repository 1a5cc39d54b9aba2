"""What a link is taken to carry while little is seen of it (pure): after a fall its former rate again, in time.

A fall shows by what waits. That the link is well again shows only when somebody sends, and who takes the link for slow sends
nothing. So a rate that nothing has confirmed for half a minute gives way to the best one that was seen: the next transfers
are the test, and lower it within a second where that was wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

FORGET_SECONDS = (
    30.0  # t is to be back within a minute of the link; of each such time a second is spent on a failed test
)


@dataclass(frozen=True)
class RateBelief:
    """In bytes per second; 0: nothing is known. Times are seconds on a clock that only goes forward."""

    bytes_per_second: float = 0.0
    best_bytes_per_second: float = 0.0
    confirmed_at: float = float("-inf")

    def seen(self, bytes_per_second: float, *, now: float) -> RateBelief:
        """With a rate that was measured."""
        return RateBelief(bytes_per_second, max(bytes_per_second, self.best_bytes_per_second), now)

    def at(self, now: float) -> RateBelief:
        """What is left of it."""
        if now - self.confirmed_at < FORGET_SECONDS:
            return self
        return RateBelief(self.best_bytes_per_second, self.best_bytes_per_second, self.confirmed_at)
