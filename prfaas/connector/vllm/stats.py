"""Counts of the connector on their way from vLLM's engine processes to /metrics of its API server."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from prfaas.connector.counts import Counts, add_to_metrics


@dataclass
class PrfaasStats(KVConnectorStats):
    """Counts under the keys of `Counts`."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, stats: KVConnectorStats) -> PrfaasStats:
        self.data = dict(Counter(self.data) + Counter(stats.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


def from_counts(counts: Counts) -> PrfaasStats | None:
    """Return the counts since the last call, or None if there are none."""
    found = PrfaasStats(dict(counts)) if counts else None
    counts.clear()
    return found


class PrfaasPromMetrics(KVConnectorPromMetrics):
    """Adder of the counts to this process's metrics."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        add_to_metrics(transfer_stats_data)
