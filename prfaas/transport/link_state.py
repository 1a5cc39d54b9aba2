"""A link's figures: what the kernel says of each connection, summed up."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from prfaas.transport.link_meter import CongestionReason, LinkLimit
from prfaas.transport.rate_belief import RateSource


@dataclass(frozen=True)
class LinkState:
    """A link at one moment; byte counts are since the link was made, over all its connections."""

    peer: str
    address: str
    num_connections: int
    is_down: bool  # it is being dialled, and the last attempt failed
    num_transfers: int
    queued_bytes: int  # ready, and not yet handed to a connection
    unacknowledged_bytes: int  # handed to a connection, and not yet acknowledged by the receiver
    unsent_bytes: int  # of those, still in the send buffers
    acknowledged_bytes: int
    rtt_seconds: float  # of the connection in use on which it has risen most; while none is used, the least there was
    min_rtt_seconds: float  # of that connection
    achievable_bytes_per_second: float  # of payload, when there is enough to send; 0: not known
    queue_seconds: float  # that what waits takes at this rate
    congestion: CongestionReason | None  # why it is choked; None: it is not
    utilization_ratio: float  # of the achievable rate, over the last third of a second; 0 while that is not known
    resent_ratio: float  # of the bytes sent in that time
    limit: LinkLimit | None  # what its connections mostly waited for in that time; None: there are none
    rate_source: RateSource | None  # what showed the rate; None: it is not known
    least_bytes_per_second: (
        float  # while it is not known, what a probe has shown the link to carry at least; 0: nothing
    )
    is_probing: bool
    sent_bytes: int  # by the kernel, headers left out
    retransmitted_bytes: int  # of those
    segment_bytes: int  # the largest that a connection sends
    packing: str  # how chunks are compressed at present, as "zstd/2" (codec, bytes of an element); "": they are not
    saved_bytes: int  # by compression
    lossy_fp8: bool  # attention blocks are cast to 8 bits, which loses some of each value
    delivery_bytes_per_second: int  # summed over the connections, as the kernel measures it over about a round trip
    pacing_bytes_per_second: int  # summed over the connections: what the kernel may send at most, headers included

    @property
    def retransmit_ratio(self) -> float:
        """Share of the sent bytes that were sent again."""
        return self.retransmitted_bytes / self.sent_bytes if self.sent_bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
