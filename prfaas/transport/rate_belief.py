"""What a link is known to carry at most, and for how long that is believed (pure).

Only what was late or waited shows a link's own rate; else it merely carries what it is given. That it is well again after a
fall shows only when somebody sends, and who takes the link for slow sends nothing. So what nothing has confirmed for half a
minute is known no more: the next transfers are the test, and show within a second where the link is still narrow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# t is to be back within a minute of the link; of each such time a second is spent on a failed test.
FORGET_SECONDS = 30.0
RateSource = Literal["transfers", "probe"]  # whose bytes waited


@dataclass(frozen=True)
class RateBelief:
    """In bytes per second; 0: not known. Times are seconds on a clock that only goes forward."""

    bytes_per_second: float = 0.0
    confirmed_at: float = float("-inf")
    source: RateSource = "transfers"

    def at(self, now: float) -> float:
        """What is left of it."""
        return self.bytes_per_second if now - self.confirmed_at < FORGET_SECONDS else 0.0
