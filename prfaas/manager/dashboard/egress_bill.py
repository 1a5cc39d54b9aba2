"""Cost of the bytes that leave priced clusters: per hour as the mean of about a minute, and since midnight."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from prfaas.model.cost.egress_price import EgressPrice

MEAN_SECONDS = 60.0
SLOT_SECONDS = 300.0  # Networks bill the 95th percentile of means over five minutes.


class EgressBill:
    """Costs by cluster since midnight UTC, or since the first `add` if that is later."""

    def __init__(self, prices: Mapping[str, EgressPrice]) -> None:
        self._prices = prices
        self._per_hour: dict[str, float] = {}
        self._today = dict.fromkeys(prices, 0.0)
        self._sent: dict[str, defaultdict[float, float]] = {}  # Bytes of today by slot.
        self._since = self._at = 0.0

    def add(self, at: float, bytes_per_second: Mapping[str, float]) -> None:
        """Charge the present rates of clusters for the seconds since the last call."""
        day, hour = divmod(at / 3600.0, 24.0)
        if self._since // 86_400.0 != day:
            self._today = dict.fromkeys(self._prices, 0.0)
            self._since, self._at, self._sent = at, at, {}
        seconds = max(0.0, at - self._at)
        for cluster, price in self._prices.items():
            per_hour = price.per_hour(bytes_per_second.get(cluster, 0.0), hour=hour)
            before = self._per_hour.get(cluster, per_hour)
            self._per_hour[cluster] = before + (per_hour - before) * min(1.0, seconds / MEAN_SECONDS)
            self._today[cluster] += per_hour * seconds / 3600.0
            sent = self._sent.setdefault(cluster, defaultdict(float))
            sent[at // SLOT_SECONDS] += bytes_per_second.get(cluster, 0.0) * seconds
        self._at = at

    def document(self) -> list[dict[str, Any]]:
        """Return one entry for each priced cluster."""
        hours, entries = (self._at - self._since) / 3600.0, []
        for name, cost in self._today.items():
            slots = sorted(self._sent.get(name, {}).values()) or [0.0]
            percentile = slots[math.ceil(0.95 * len(slots)) - 1] / SLOT_SECONDS
            committed = self._prices[name].committed_per_hour(percentile)
            per_hour, today = self._per_hour.get(name, 0.0) + committed, cost + committed * hours
            entries.append({"cluster": name, "per_hour": per_hour, "today": today, "since": self._since})
        return entries
