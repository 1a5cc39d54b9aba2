"""What the receiving end and its caller say to each other about transfers that arrive."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from prfaas.transport.protocol.messages import ObjectSizes
from prfaas.types import FailureReason


@dataclass(frozen=True)
class TransferStats:
    """What a transfer cost on the wire."""

    wire_bytes: int
    checksum_failures: int


NOTHING_RECEIVED = TransferStats(0, 0)


@dataclass(frozen=True)
class OpenRequest:
    """A peer wants to send objects of these sizes."""

    transfer_id: bytes
    peer_name: str
    open_body: bytes
    object_bytes: ObjectSizes
    deadline_seconds: float


@dataclass(frozen=True)
class Accepted:
    """Send what is not `held`; `destination` gives the memory of an object, and is called from any thread. None: what comes
    is checked and thrown away."""

    held: Collection[int]
    destination: Callable[[int], memoryview] | None


@dataclass(frozen=True)
class Rejected:
    reason: FailureReason
    message: str


@dataclass(frozen=True)
class ReceiveCompleted:
    """Every byte has landed and was checked."""

    transfer_id: bytes
    stats: TransferStats


@dataclass(frozen=True)
class ReceiveFailed:
    """A transfer ended without its data. Also said of a transfer that was cancelled before its OPEN came."""

    transfer_id: bytes
    peer_name: str
    reason: FailureReason
    message: str
    stats: TransferStats = NOTHING_RECEIVED


@dataclass(frozen=True)
class ReceiveMemoryFree:
    """No thread writes to this transfer's memory any more; last, and once for each transfer that was accepted."""

    transfer_id: bytes


ReceiveEvent = ReceiveCompleted | ReceiveFailed | ReceiveMemoryFree
