"""Division of a limit among clients: a lone client uses all but a reserve, and fairness begins when the rest is taken."""

from collections import Counter
from typing import Literal

from prfaas import metrics

RESERVE_RATIO = 1 / 8  # Part of a limit that only clients with less than an equal share may use.


class ClientBudget:
    """Amounts of one resource that clients hold. Any client may hold `least`, if there is room.

    Without `has_reserve` the only client may take everything. Every refusal is counted by its reason.
    """

    def __init__(
        self,
        resource: Literal["connections", "requests", "body_bytes"],
        total: int,
        *,
        least: int = 1,
        has_reserve: bool = True,
    ) -> None:
        self.total = total
        self._resource = resource
        self._least = least
        self._reserve = max(1, int(total * RESERVE_RATIO)) if has_reserve else 0
        self._held: Counter[str] = Counter()
        self._num_held = 0

    def take(self, client: str, amount: int = 1) -> bool:
        """Let a client hold more. Return False, and count a refusal, if there is no room."""
        if not amount:  # An entry would count as a client until it gave something back.
            return True
        left = self.total - self._num_held - amount
        if left < 0:
            metrics.CLIENT_REFUSALS.labels(reason=self._resource).inc()
            return False
        equal_share = self.total // max(2, len(self._held))  # One more client is expected beside a lone one.
        if left < self._reserve and self._held[client] + amount > max(self._least, equal_share):
            metrics.CLIENT_REFUSALS.labels(reason=f"{self._resource}_of_client").inc()
            return False
        self._held[client] += amount
        self._num_held += amount
        return True

    def give_back(self, client: str, amount: int = 1) -> None:
        """Take back what a client holds."""
        self._num_held -= amount
        self._held[client] -= amount
        if not self._held[client]:
            del self._held[client]
