"""Record of each transfer with times, bytes and outcome, and one log line at its end."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from prfaas import logs, metrics
from prfaas.agent.transfer.plan import TransferPlan
from prfaas.tracing import NO_SPAN, Span, continued
from prfaas.transport.sender.api import SendAccepted, SendCompleted, SendEvent, SendFailed, SendProgress
from prfaas.types import TransferId, TransferPhase, TransferTiming

# About 1 KiB for each record.
MAX_RECORDS = 1024
_NS = 1e-9
_log = logs.get("agent.transfer")

Direction = Literal["out", "in"]


@dataclass
class TransferRecord:
    """One transfer as seen by this node. Times are CLOCK_MONOTONIC nanoseconds, bytes are payload."""

    transfer_id: TransferId
    direction: Direction
    peer: str
    num_tokens: int
    payload_bytes: int
    attention_bytes: int
    # Priority on the wire of an outbound transfer; lower is more urgent.
    priority: int | None = None
    # Bytes that the receiver had already.
    held_bytes: int = 0
    opened_ns: int = field(default_factory=time.monotonic_ns)
    accepted_ns: int | None = None
    first_acknowledged_ns: int | None = None
    first_layer_ns: int | None = None
    # End of the last forward pass of the prefill.
    forward_ended_ns: int | None = None
    # All bytes have arrived, or the transfer failed.
    ended_ns: int | None = None
    acknowledged_bytes: int = 0
    acknowledged_before_prefill_ended_bytes: int = 0
    # Payload and framing that crossed the wire.
    wire_bytes: int = 0
    checksum_failures: int = 0
    outcome: str = "running"
    # Ends with the record.
    span: Span = NO_SPAN

    @property
    def has_arrived(self) -> bool:
        """True when the peer has all bytes and the record is still open."""
        return self.outcome == "running" and self.ended_ns is not None

    def acknowledge(self, time_ns: int, num_bytes: int) -> None:
        """Record that `num_bytes` are acknowledged in total."""
        self.first_acknowledged_ns = self.first_acknowledged_ns or time_ns
        self.acknowledged_bytes = num_bytes

    def end_forward(self, time_ns: int) -> None:
        """Record the end of a forward pass, which workers report within milliseconds."""
        self.forward_ended_ns = time_ns
        self.acknowledged_before_prefill_ended_bytes = self.acknowledged_bytes

    def phases(self) -> dict[TransferPhase, float]:
        """Return the seconds of each phase of a completed outbound transfer; empty for a copy, which has no prefill."""
        if self.forward_ended_ns is None or self.ended_ns is None:
            return {}
        first = self.forward_ended_ns if self.first_layer_ns is None else self.first_layer_ns
        moments = [self.opened_ns, first, self.forward_ended_ns, self.ended_ns]
        queue, prefill, wire = (max(0, after - before) * _NS for before, after in pairwise(moments))
        return {"queue": queue, "prefill": prefill, "wire": wire}

    def to_dict(self) -> dict[str, Any]:
        """Return the record for the status page and the log line."""
        return {
            "transfer_id": self.transfer_id.hex(),
            "direction": self.direction,
            "peer": self.peer,
            "priority": self.priority,
            "outcome": self.outcome,
            "num_tokens": self.num_tokens,
            "payload_bytes": self.payload_bytes,
            "attention_bytes": self.attention_bytes,
            "held_bytes": self.held_bytes,
            "wire_bytes": self.wire_bytes,
            "acknowledged_bytes": self.acknowledged_bytes,
            "acknowledged_before_prefill_ended_bytes": self.acknowledged_before_prefill_ended_bytes,
            "checksum_failures": self.checksum_failures,
            "accepted_seconds": self._since_open(self.accepted_ns),
            "first_acknowledged_seconds": self._since_open(self.first_acknowledged_ns),
            "first_layer_seconds": self._since_open(self.first_layer_ns),
            "forward_ended_seconds": self._since_open(self.forward_ended_ns),
            "ended_seconds": self._since_open(self.ended_ns),
        }

    def _since_open(self, time_ns: int | None) -> float | None:
        return None if time_ns is None else round((time_ns - self.opened_ns) * _NS, 6)


class TransferLog:
    """Recent transfers, newest last."""

    def __init__(self, report: Callable[[TransferTiming], None] = lambda timing: None) -> None:
        """`report` gets the seconds of each phase of a completed transfer."""
        self._report = report
        self._records: deque[TransferRecord] = deque(maxlen=MAX_RECORDS)

    def begin(
        self,
        plan: TransferPlan,
        transfer_id: TransferId,
        direction: Direction,
        peer: str,
        *,
        priority: int | None = None,
        held_bytes: int = 0,
        trace: str = "",
    ) -> TransferRecord:
        """Add and return the record of a transfer that begins now; `trace` is the traceparent of its span."""
        span = continued(
            "agent.send" if direction == "out" else "agent.receive",
            trace,
            kind="client" if direction == "out" else "server",
            transfer_id=transfer_id.hex(),
            peer=peer,
            num_tokens=plan.num_tokens,
            payload_bytes=plan.total_bytes,
        )
        sizes = (plan.num_tokens, plan.total_bytes, plan.attention_bytes)
        record = TransferRecord(transfer_id, direction, peer, *sizes, priority, held_bytes, span=span)
        self._records.append(record)
        return record

    def follow(self, record: TransferRecord, event: SendEvent) -> None:
        """Record a link's event for an outbound transfer. A failure closes the record; `complete` closes a success."""
        if isinstance(event, SendAccepted):
            record.accepted_ns = time.monotonic_ns()
            record.held_bytes = record.payload_bytes - event.missing_bytes
            record.span.event("accepted")
        elif isinstance(event, SendProgress):
            record.acknowledge(event.time_ns, event.acked_bytes)
        elif isinstance(event, SendCompleted):
            record.acknowledge(time.monotonic_ns(), record.payload_bytes - record.held_bytes)
            record.wire_bytes = event.stats.wire_bytes
            record.checksum_failures = event.stats.checksum_failures
            record.ended_ns = time.monotonic_ns()
        elif isinstance(event, SendFailed):
            self.end(record, event.reason, message=event.message)

    def complete(self, record: TransferRecord) -> None:
        """Close the record of a transfer that has arrived and that no worker fills any more."""
        self.end(record, "completed")
        self._time(record, record.phases())

    def end(self, record: TransferRecord, outcome: str, *, message: str = "") -> None:
        """Close a record: write its log line and count it."""
        record.outcome = outcome
        record.ended_ns = record.ended_ns or time.monotonic_ns()
        record.span.note(held_bytes=record.held_bytes, wire_bytes=record.wire_bytes)
        record.span.end("" if outcome == "completed" else f"{outcome}: {message}")
        metrics.TRANSFERS.labels(direction=record.direction, outcome=outcome).inc()
        metrics.WIRE_BYTES.labels(direction=record.direction).inc(record.wire_bytes)
        if record.direction == "in":
            metrics.CHECKSUM_FAILURES.inc(record.checksum_failures)
        _log.info(
            "transfer.complete" if outcome == "completed" else "transfer.failed", message=message, **record.to_dict()
        )

    def loaded(self, record: TransferRecord) -> None:
        """Record that the engine has read the blocks of a completed inbound transfer."""
        if record.ended_ns is not None:
            self._time(record, {"load": (time.monotonic_ns() - record.ended_ns) * _NS})

    def _time(self, record: TransferRecord, seconds: Mapping[TransferPhase, float]) -> None:
        for phase, phase_seconds in seconds.items():
            metrics.TRANSFER_PHASE_SECONDS.labels(phase=phase).observe(phase_seconds)
        if seconds:
            self._report(TransferTiming(record.transfer_id, seconds))

    def to_list(self) -> list[dict[str, Any]]:
        """Return all records; callable from any thread."""
        return [record.to_dict() for record in list(self._records)]
