"""Requests to send a transfer, and the events that report its progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas.transport.protocol.messages import TransferStats
from prfaas.transport.ranges import Ranges
from prfaas.types import FailureReason


@dataclass(frozen=True)
class SendRequest:
    """Description of one outbound transfer."""

    transfer_id: bytes
    open_body: bytes  # Payload of the OPEN frame.
    object_bytes: Sequence[int]
    source: Callable[[int], memoryview]  # Memory of an object, which must stay unchanged until SendMemoryFree.
    priority: int  # Lower is more urgent. Each step divides the share of the link by 16.
    deadline_seconds: float
    tenant: str = ""  # Tenants share the link by weight.


@dataclass(frozen=True)
class SendAccepted:
    """The peer accepted the transfer. It holds the objects `held`, so that `missing_bytes` must travel."""

    transfer_id: bytes
    missing_bytes: int
    held: Ranges


@dataclass(frozen=True)
class SendProgress:
    """Bytes that have arrived and passed their checksum, in total. Decreases only if the peer lost its memory."""

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
    """No thread reads the transfer's memory any more. Last event of every transfer."""

    transfer_id: bytes


SendEvent = SendAccepted | SendProgress | SendCompleted | SendFailed | SendMemoryFree
