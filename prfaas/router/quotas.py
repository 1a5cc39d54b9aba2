"""How much each client may ask for: token buckets of a minute, of requests and of tokens (pure).

A bucket holds what a minute allows and fills up steadily, so a client that was quiet may use a whole minute's at once.
Requests are taken as they come; tokens as far as they are known, the rest when the answer has ended. So tokens may go below
zero: then the client waits until they are above it again, and over time has no more than its rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

MINUTE_SECONDS = 60.0
Limit = Literal["requests", "tokens"]
_LEAST: Mapping[Limit, float] = {"requests": 1.0, "tokens": math.ulp(1.0)}  # for one request to be let in


@dataclass(frozen=True)
class Quota:
    """What one client may have in a minute; 0: as much as it likes."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0


@dataclass(frozen=True)
class Spent:
    """A quota that is used up, and when there is some of it again."""

    limit: Limit
    wait_seconds: float


class Bucket:
    """What is left of a limit; `now` never goes back."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._most = float(per_minute)
        self._left = self._most
        self._at = now

    def wait_seconds(self, least: float, now: float) -> float:
        """Until `least` is there; 0 when it is."""
        self._left = min(self._most, self._left + (now - self._at) * self._most / MINUTE_SECONDS)
        self._at = now
        return max(0.0, (least - self._left) * MINUTE_SECONDS / self._most)

    def take(self, amount: float, now: float) -> None:
        """Take an amount, or give it back where it is negative."""
        self.wait_seconds(0.0, now)
        self._left = min(self._most, self._left - amount)


class Quotas:
    """The quotas of all clients of one router."""

    def __init__(self, by_client: Mapping[str, Quota], default: Quota, clock: Callable[[], float]) -> None:
        """`default` holds for each client that `by_client` does not name, for each its own."""
        self._by_client = by_client
        self._default = default
        self._clock = clock
        self._buckets: dict[str, dict[Limit, Bucket]] = {}

    def admit(self, client: str) -> Spent | None:
        """Take one request, or say what is used up."""
        buckets = self._of(client)
        if not buckets:
            return None
        now = self._clock()
        waits = {limit: bucket.wait_seconds(_LEAST[limit], now) for limit, bucket in buckets.items()}
        limit = max(waits, key=lambda its: waits[its])
        if waits[limit] > 0:
            return Spent(limit, waits[limit])
        if "requests" in buckets:
            buckets["requests"].take(1.0, now)
        return None

    def charge(self, client: str, num_tokens: int) -> None:
        """Take tokens; a negative number gives back."""
        bucket = self._of(client).get("tokens")
        if bucket is not None:
            bucket.take(num_tokens, self._clock())

    def _of(self, client: str) -> dict[Limit, Bucket]:
        """A client's buckets, of what is limited; clients are named by the router's own files, so there are few."""
        buckets = self._buckets.get(client)
        if buckets is None:
            its, now = self._by_client.get(client, self._default), self._clock()
            limits: dict[Limit, int] = {"requests": its.requests_per_minute, "tokens": its.tokens_per_minute}
            buckets = {name: Bucket(per_minute, now) for name, per_minute in limits.items() if per_minute}
            self._buckets[client] = buckets
        return buckets
