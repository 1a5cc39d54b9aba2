"""Requests, decisions and events that a receiver and its caller exchange about inbound transfers."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from prfaas.transport.protocol.messages import ObjectSizes, TransferStats
from prfaas.types import FailureReason

NOTHING_RECEIVED = TransferStats(0, 0)


@dataclass(frozen=True)
class ReceiveProgress:
    """Bytes of a transfer that have not ended. Times are monotonic seconds, None before the first byte."""

    total_bytes: int
    missing_bytes: int
    first_at: float | None
    latest_at: float | None


@dataclass(frozen=True)
class OpenRequest:
    """Request of a peer to send objects of these sizes."""

    transfer_id: bytes
    peer_name: str
    open_body: bytes
    object_bytes: ObjectSizes
    deadline_seconds: float


@dataclass(frozen=True)
class Acceptance:
    """Decision to receive all objects that are not `held`.

    `destination` returns the memory of an object and is called from any thread.
    """

    held: Collection[int]
    destination: Callable[[int], memoryview]


@dataclass(frozen=True)
class Rejection:
    """Decision not to receive a transfer."""

    reason: FailureReason
    message: str


Decision = Acceptance | Rejection
AcceptFunction = Callable[[OpenRequest, Callable[[Decision], None]], None]


@dataclass(frozen=True)
class ReceiveCompleted:
    """Event: every byte has been written and checked."""

    transfer_id: bytes
    stats: TransferStats


@dataclass(frozen=True)
class ReceiveFailed:
    """Event: a transfer ended without its data, or was cancelled before its OPEN arrived."""

    transfer_id: bytes
    peer_name: str
    reason: FailureReason
    message: str
    stats: TransferStats = NOTHING_RECEIVED


@dataclass(frozen=True)
class ReceiveMemoryFree:
    """Event: no thread writes to the transfer's memory any more. The last event, once per accepted transfer."""

    transfer_id: bytes


ReceiveEvent = ReceiveCompleted | ReceiveFailed | ReceiveMemoryFree
