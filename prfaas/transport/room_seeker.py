"""When a link may have become wider than its connections believe (pure).

BBR keeps a rate that the link once refused, and tries a quarter more every eighth round trip: after a link has widened
threefold over 40 ms that takes up to two seconds. But while the link is full its queue shows in the round trips; bytes that
wait at our end while the round trips are as short as can be say that there is room.
"""

from __future__ import annotations

from prfaas.transport.link_meter import LinkSample

PATIENCE_SECONDS = 0.15  # of samples that all say so
RTT_RATIO, RTT_RISE_SECONDS = 1.15, 0.001  # up to which a round trip counts as without a queue


class RoomSeeker:
    """Takes the link meter's samples."""

    def __init__(self) -> None:
        self._since: float | None = None

    def is_due(self, sample: LinkSample) -> bool:
        """Whether a connection should look for a higher rate now."""
        has_queue = sample.rtt_seconds > RTT_RATIO * sample.min_rtt_seconds + RTT_RISE_SECONDS
        if has_queue or not sample.queued_bytes:
            self._since = None
        elif self._since is None:
            self._since = sample.at
        elif sample.at - self._since >= PATIENCE_SECONDS:
            self._since = sample.at
            return True
        return False
