"""What one connection of a link says of itself, so that a path that is worse than the others can be told.

Of a connection that has lived for days its whole life says little, and a third of a second is over when somebody looks: what
it sends again and what it waits for are of its last ten seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from prfaas.transport.link_meter import LinkLimit, limit_of
from prfaas.transport.stalls import Pulse
from prfaas.transport.tcp_info import Growth, TcpInfo

RECENT_SECONDS, RECENT_STEP_SECONDS = 10.0, 1.0


class Recent:
    """What has come to a connection of late, by the kernel."""

    def __init__(self, began_at: float) -> None:
        """Times are monotonic seconds."""
        self._seen: deque[tuple[float, TcpInfo | None]] = deque([(began_at, None)])

    def add(self, info: TcpInfo, now: float) -> None:
        """Take a look, of which there may be many more than are kept."""
        if now - self._seen[-1][0] < RECENT_STEP_SECONDS:
            return
        self._seen.append((now, info))
        while now - self._seen[1][0] >= RECENT_SECONDS:
            self._seen.popleft()

    def until(self, info: TcpInfo, now: float) -> tuple[float, Growth]:
        """Over how many seconds, and what."""
        at, before = self._seen[0]
        return now - at, info.grown_since(before)


@dataclass(frozen=True)
class ConnectionState:
    """A connection at one moment; `resent_ratio` and `limit` are of its last ten seconds."""

    local_address: str
    remote_address: str
    age_seconds: float
    rtt_seconds: float  # the kernel's mean, which stays where the last burst left it
    min_rtt_seconds: float
    delivery_bytes_per_second: int  # as the kernel measured it last
    sent_bytes: int  # since it was made
    retransmitted_bytes: int  # of those
    resent_ratio: float  # of the bytes sent
    limit: LinkLimit | None  # what it mostly waited for; None: it has just been made
    unsent_bytes: int  # in its send buffer
    unacknowledged_bytes: int  # payload that it has taken and that the peer has not acknowledged
    still_seconds: float  # for how long chunks have waited on it and nothing has moved; 0: none wait

    @classmethod
    def of(
        cls,
        addresses: tuple[str, str],
        info: TcpInfo,
        *,
        recent: Recent,
        pulse: Pulse,
        unacknowledged_bytes: int,
        now: float,
    ) -> ConnectionState:
        """By what the kernel says at present and has said of late; `addresses` are its two ends."""
        seconds, grown = recent.until(info, now)
        waits_since = pulse.waits_since
        return cls(
            *addresses,
            age_seconds=now - pulse.began_at,
            rtt_seconds=info.rtt_seconds,
            min_rtt_seconds=info.min_rtt_seconds,
            delivery_bytes_per_second=info.delivery_bytes_per_second,
            sent_bytes=info.bytes_sent,
            retransmitted_bytes=info.bytes_retransmitted,
            resent_ratio=grown.retransmitted_bytes / grown.sent_bytes if grown.sent_bytes else 0.0,
            limit=limit_of(
                seconds,
                busy_seconds=grown.busy_seconds,
                receiver_limited_seconds=grown.receiver_limited_seconds,
                buffer_limited_seconds=grown.buffer_limited_seconds,
            ),
            unsent_bytes=info.unsent_bytes,
            unacknowledged_bytes=unacknowledged_bytes,
            still_seconds=0.0 if waits_since is None else now - waits_since,
        )
