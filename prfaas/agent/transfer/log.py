"""What is remembered of each transfer: its times, its bytes, its outcome; one canonical log line at its end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from prfaas import logs, metrics
from prfaas.tracing import NO_SPAN, Span
from prfaas.transport.sender.api import SendAccepted, SendCompleted, SendEvent, SendFailed, SendProgress
from prfaas.types import TransferId, TransferPhase, TransferTiming

MAX_REMEMBERED = 1024  # about 1 KiB each, and what follows
MAX_LATER = (
    64  # acknowledgements, about 130 bytes each, of which it is not known yet whether a forward pass came after them
)
_NS = 1e-9
_log = logs.get("agent.transfer")

Direction = Literal["out", "in"]


@dataclass
class TransferRecord:
    """One transfer as this node saw it. Times are CLOCK_MONOTONIC nanoseconds, bytes are payload."""

    transfer_id: TransferId
    direction: Direction
    peer: str
    num_tokens: int
    payload_bytes: int
    attention_bytes: int
    priority: int | None = None  # on the wire, lowest first, of one that leaves
    held_bytes: int = 0  # what the receiver had already
    opened_ns: int = field(default_factory=time.monotonic_ns)
    accepted_ns: int | None = None
    first_acknowledged_ns: int | None = None
    first_layer_ns: int | None = None  # the first layer that the prefill brought
    forward_ended_ns: int | None = None  # the last forward pass of the prefill
    ended_ns: int | None = None  # all bytes have arrived, or it has failed
    acknowledged_bytes: int = 0
    acknowledged_before_prefill_ended_bytes: int = 0  # before the last forward pass ended, of measured events only
    wire_bytes: int = 0  # payload and framing that crossed the wire
    checksum_failures: int = 0
    outcome: str = "running"
    span: Span = NO_SPAN  # ends with the record
    _later: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MAX_LATER))

    @property
    def has_arrived(self) -> bool:
        """Whether the peer has all of it and the record is not closed yet."""
        return self.outcome == "running" and self.ended_ns is not None

    def acknowledge(self, time_ns: int, num_bytes: int) -> None:
        self.first_acknowledged_ns = self.first_acknowledged_ns or time_ns
        self.acknowledged_bytes = num_bytes
        self._later.append((time_ns, num_bytes))

    def end_forward(self, time_ns: int) -> None:
        """A forward pass has ended, perhaps the last one; acknowledgements of before and after may be noted already."""
        self.forward_ended_ns = time_ns
        while self._later and self._later[0][0] <= time_ns:
            self.acknowledged_before_prefill_ended_bytes = self._later.popleft()[1]

    def phases(self) -> dict[TransferPhase, float]:
        """Seconds of a whole transfer that left; empty for a copy, which nobody computes."""
        if self.forward_ended_ns is None or self.ended_ns is None:
            return {}
        first = self.forward_ended_ns if self.first_layer_ns is None else self.first_layer_ns
        moments = [self.opened_ns, first, self.forward_ended_ns, self.ended_ns]
        queue, prefill, wire = (max(0, after - before) * _NS for before, after in pairwise(moments))
        return {"queue": queue, "prefill": prefill, "wire": wire}

    def to_dict(self) -> dict[str, Any]:
        """The record as the status page and the log line show it."""
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
    """The transfers of late, newest last."""

    def __init__(self, report: Callable[[TransferTiming], None] = lambda timing: None) -> None:
        """`report` hears how long the phases of a whole transfer were."""
        self._report = report
        self._records: deque[TransferRecord] = deque(maxlen=MAX_REMEMBERED)

    def begin(self, record: TransferRecord) -> TransferRecord:
        self._records.append(record)
        return record

    def follow(self, record: TransferRecord, event: SendEvent) -> None:
        """Note what the link says of a transfer that leaves; a failure closes the record, and `complete` closes a whole one."""
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
        """Close the record of a transfer that the peer has and that nobody computes any more."""
        self.end(record, "completed")
        self._time(record, record.phases())

    def end(self, record: TransferRecord, outcome: str, *, message: str = "") -> None:
        """Close a record: one log line, one count."""
        record.outcome = outcome
        record.ended_ns = record.ended_ns or time.monotonic_ns()
        record.span.note(held_bytes=record.held_bytes, wire_bytes=record.wire_bytes)
        record.span.end("" if outcome == "completed" else f"{outcome}: {message}")
        metrics.TRANSFERS.labels(direction=record.direction, outcome=outcome).inc()
        metrics.WIRE_BYTES.labels(direction=record.direction).inc(record.wire_bytes)
        if record.direction == "in":
            metrics.CHECKSUM_FAILURES.inc(record.checksum_failures)
        else:
            metrics.ACKNOWLEDGED_BYTES.inc(record.acknowledged_bytes)
        _log.info(
            "transfer.complete" if outcome == "completed" else "transfer.failed", message=message, **record.to_dict()
        )

    def loaded(self, record: TransferRecord) -> None:
        """The engine has read what this transfer brought, all of which was here when the record ended."""
        if record.ended_ns is not None:
            self._time(record, {"load": (time.monotonic_ns() - record.ended_ns) * _NS})

    def _time(self, record: TransferRecord, seconds: Mapping[TransferPhase, float]) -> None:
        for phase, its in seconds.items():
            metrics.TRANSFER_PHASE_SECONDS.labels(phase=phase).observe(its)
        if seconds:
            self._report(TransferTiming(record.transfer_id, seconds))

    def to_list(self) -> list[dict[str, Any]]:
        """From any thread."""
        return [record.to_dict() for record in list(self._records)]
