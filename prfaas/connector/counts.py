"""Counts of an engine's transfers and copies, on their way to its metrics."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from prfaas import metrics
from prfaas.types import LegReason, TransferOutcome

TransferKind = Literal["send", "receive", "reuse", "store", "checkpoint", "fallback"]
_METRICS: Mapping[str, Any] = {
    "transfers": metrics.CONNECTOR_TRANSFERS,
    "bytes": metrics.CONNECTOR_COPIED_BYTES,
    "state_tail_bytes": metrics.CONNECTOR_STATE_TAIL_BYTES,
    "ring_overflows": metrics.CONNECTOR_RING_OVERFLOWS,
}


class Counts(Counter[str]):
    """Counts since the previous report. Keys are a word of `_METRICS` and its labels, such as "transfers send completed"."""

    def add_transfer(self, kind: TransferKind, outcome: TransferOutcome | LegReason) -> None:
        """Count a transfer that has ended, or a fallback by the router's reason."""
        self[f"transfers {kind} {outcome}"] += 1


def add_to_metrics(counts: Mapping[str, float]) -> None:
    """Add counts to the metrics of this process."""
    for key, amount in counts.items():
        word, *labels = key.split(" ")
        metric = _METRICS[word]
        (metric.labels(*labels) if labels else metric).inc(amount)
