"""Counts of the connector on their way from vLLM's engine processes to /metrics of its API server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from prfaas import metrics
from prfaas.connector.metadata import Counts

_STATE_TAIL, _RING_OVERFLOWS = "state_tail_bytes", "ring_overflows"


@dataclass
class PrfaasStats(KVConnectorStats):
    """Counts with flat keys: "transfers send completed", "bytes receive", "state_tail_bytes", "ring_overflows"."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, stats: KVConnectorStats) -> PrfaasStats:
        for key, count in stats.data.items():
            self.data[key] = self.data.get(key, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


def from_counts(counts: Counts) -> PrfaasStats | None:
    """Return the counts since the last call, or None if there are none."""
    if not counts:
        return None
    taken = counts.take()
    data: dict[str, Any] = {" ".join(("transfers", *key)): count for key, count in taken.transfers.items()}
    data |= {f"bytes {direction}": count for direction, count in taken.copied_bytes.items()}
    data |= {f"recompute {kind}": seconds for kind, seconds in taken.recompute_seconds.items()}
    totals = {_STATE_TAIL: taken.state_tail_bytes, _RING_OVERFLOWS: taken.ring_overflows}
    return PrfaasStats(data | {key: count for key, count in totals.items() if count})


class PrfaasPromMetrics(KVConnectorPromMetrics):
    """Adder of the counts to this process's metrics."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, count in transfer_stats_data.items():
            kind, *labels = key.split(" ")
            if kind == "transfers":
                metrics.CONNECTOR_TRANSFERS.labels(direction=labels[0], outcome=labels[1]).inc(count)
            elif kind == "bytes":
                metrics.CONNECTOR_COPIED_BYTES.labels(direction=labels[0]).inc(count)
            elif kind == "recompute":
                metrics.CONNECTOR_RECOMPUTE_SECONDS.labels(kind=labels[0]).inc(count)
            elif kind == _STATE_TAIL:
                metrics.CONNECTOR_STATE_TAIL_BYTES.inc(count)
            elif kind == _RING_OVERFLOWS:
                metrics.CONNECTOR_RING_OVERFLOWS.inc(count)
