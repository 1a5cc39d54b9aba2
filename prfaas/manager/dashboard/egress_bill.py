"""Cost of the bytes that leave priced clusters: per hour as the mean of about a minute, and since midnight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prfaas.model.cost.egress_price import EgressPrice

MEAN_SECONDS = 60.0


class EgressBill:
    """Costs by cluster since midnight UTC, or since the first `add` if that is later."""

    def __init__(self, prices: Mapping[str, EgressPrice]) -> None:
        self._prices = prices
        self._per_hour: dict[str, float] = {}
        self._today = dict.fromkeys(prices, 0.0)
        self._since = self._at = 0.0

    def add(self, at: float, bytes_per_second: Mapping[str, float]) -> None:
        """Charge the present rates of clusters for the seconds since the last call."""
        day, hour = divmod(at / 3600.0, 24.0)
        if self._since // 86_400.0 != day:
            self._today = dict.fromkeys(self._prices, 0.0)
            self._since = self._at = at
        seconds = max(0.0, at - self._at)
        for cluster, price in self._prices.items():
            per_hour = price.per_hour(bytes_per_second.get(cluster, 0.0), hour=hour)
            before = self._per_hour.get(cluster, per_hour)
            self._per_hour[cluster] = before + (per_hour - before) * min(1.0, seconds / MEAN_SECONDS)
            self._today[cluster] += per_hour * seconds / 3600.0
        self._at = at

    def document(self) -> list[dict[str, Any]]:
        """Return one entry for each priced cluster."""
        return [
            {"cluster": name, "per_hour": self._per_hour.get(name, 0.0), "today": cost, "since": self._since}
            for name, cost in self._today.items()
        ]
