"""What a link's connections carry while they are full, said each time that is settled, for their number (pure)."""

from __future__ import annotations

from prfaas.transport.connection_policy import Carried
from prfaas.transport.link_meter import LinkSample

SETTLED_SECONDS = 2.0  # of being full: what has just begun is still finding its rate


class ConnectionReview:
    """Takes the link meter's samples."""

    def __init__(self) -> None:
        self._last: LinkSample | None = None
        self._begin(0)

    def _begin(self, num_connections: int) -> None:
        self._num_connections = num_connections
        self._seconds = 0.0
        self._delivered_bytes = self._sent_bytes = self._retransmitted_bytes = 0

    def add(self, sample: LinkSample, *, num_connections: int) -> Carried | None:
        """What so many connections have carried in the last SETTLED_SECONDS that more waited than they took; else None.

        Other time does not count, and with another number of them it begins anew.
        """
        last, self._last = self._last, sample
        if num_connections != self._num_connections:
            self._begin(num_connections)
        elif last is not None and last.queued_bytes and sample.queued_bytes:
            self._seconds += sample.at - last.at
            self._delivered_bytes += sample.delivered_bytes - last.delivered_bytes
            self._sent_bytes += sample.sent_bytes - last.sent_bytes
            self._retransmitted_bytes += sample.retransmitted_bytes - last.retransmitted_bytes
        if self._seconds < SETTLED_SECONDS:
            return None
        carried = Carried(
            num_connections,
            self._delivered_bytes / self._seconds,
            self._retransmitted_bytes / self._sent_bytes if self._sent_bytes else 0.0,
        )
        self._begin(num_connections)
        return carried
