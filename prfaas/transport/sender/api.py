"""Requests to send a transfer, and the events that report its progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prfaas.transport.ranges import Ranges
from prfaas.transport.receiver.api import TransferStats
from prfaas.types import FailureReason


@dataclass(frozen=True)
class SendRequest:
    """Objects to send. `source` gives an object's memory, which must stay unchanged until SendMemoryFree.

    A lower `priority` is more urgent: each step is a sixteenth of the share of the link. The objects `castable` hold
    nothing but bfloat16: where both ends ask for it they are cast to 8 bits, which loses some of each. Where `open_body`
    leaves out what the peer knows, `whole_body` makes the body for a process of the peer that may not.
    """

    transfer_id: bytes
    open_body: bytes
    object_bytes: Sequence[int]
    source: Callable[[int], memoryview]
    priority: int
    deadline_seconds: float
    castable: Ranges = field(default_factory=Ranges)
    whole_body: Callable[[], bytes] | None = None


@dataclass(frozen=True)
class SendAccepted:
    """The peer answered: it has the objects `held`, and `missing_bytes` must travel. `process` names the one that answered."""

    transfer_id: bytes
    missing_bytes: int
    held: Ranges
    process: bytes


@dataclass(frozen=True)
class SendProgress:
    """`acked_bytes` have landed and were checked, in all; fewer than before only when the peer lost its memory."""

    transfer_id: bytes
    acked_bytes: int
    time_ns: int  # CLOCK_MONOTONIC


@dataclass(frozen=True)
class SendCompleted:
    """The peer has every byte."""

    transfer_id: bytes
    stats: TransferStats


@dataclass(frozen=True)
class SendFailed:
    transfer_id: bytes
    reason: FailureReason
    message: str


@dataclass(frozen=True)
class SendMemoryFree:
    """No thread reads this transfer's memory any more; last, and once for each transfer."""

    transfer_id: bytes


SendEvent = SendAccepted | SendProgress | SendCompleted | SendFailed | SendMemoryFree
