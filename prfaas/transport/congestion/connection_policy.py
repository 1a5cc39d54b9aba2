"""Connection policy of a link: number of connections, searches for a higher rate, and drains of the queue (pure).

One connection keeps at most its send buffer in flight, so a long link needs several. On a short link more than two only
overshoot its queue and cost processor time. Measured over emulated links:

- 10 Gbit/s, 2 ms: two connections sustain 0.998 of the link; eight sustain 0.87 of it on short transfers.
- 5 Gbit/s, 30 ms: eight are needed.
- 5 Gbit/s, 80 ms: 8, 16, 24 connections carry 0.68, 0.90, 0.86 of the link; the last with 3.7 % retransmitted.
- 2 Gbit/s, 200 ms: 8, 16, 24 connections carry 0.72, 0.87, 0.85 of it; the last with 10.8 % retransmitted.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.transport.congestion.rate_estimator import RETRANSMIT_RATIO, LinkSample

FIRST_CONNECTIONS = 8  # Dialled at once, before the round-trip time is known.
MIN_CONNECTIONS, MAX_CONNECTIONS = 2, 8  # Range until the throughput is known.
MAX_MEASURED_CONNECTIONS = 32  # Limit for a number that follows the throughput.
MEASURED_ROOM, FIRST_ROOM = 1.5, 2.0  # Bytes in flight, relative to the bandwidth-delay product.
LOSS_BASED_CONNECTIONS = 32  # On a long link. More of them overshoot its queue together and lose their start.
LONG_RTT_SECONDS = 0.005
NOT_SENT_LOW_WATER_BYTES = 128 << 10  # A connection takes new work only when its own is nearly on the wire.
SHORT_NOT_SENT_LOW_WATER_BYTES = 512 << 10  # A short link drains the other amount faster than a thread wakes.
FILLED_BYTES_PER_SECOND = 1.25e9  # The first connections suffice for 10 Gbit/s.
IN_FLIGHT_BYTES = 4.7e6  # Of a connection with a send buffer of 4 MiB, which the kernel doubles.
RATE_BASED = frozenset({"bbr", "bbr2", "bbr3"})  # Congestion control that follows the measured rate, not losses.
ROOM_SECONDS = 0.15  # Samples must show room for this long before a search.
NO_QUEUE_RATIO, NO_QUEUE_RISE_SECONDS = 1.15, 0.001  # A longer round trip shows a queue.
TURN_SECONDS = 8.0  # Time from one turn of a connection to its next.
LITTLE_QUEUE_RATIO = 1.5  # Up to this round-trip ratio a search adds no noticeable wait.
MIN_SEARCH_CONNECTIONS = 4  # With fewer, none can be spared.
DRAIN_RATIO = 0.95  # Share of the rate that is sent while the queue drains.
LONG_QUEUE_RATIO = 1.25  # A longer round trip starts a drain.
DRAIN_ROUND_TRIPS = 50  # A queue of one bandwidth-delay product drains in 20.
DRAIN_RETRY_SECONDS = 10.0


class LinkThroughput(NamedTuple):
    """Steady throughput of a link's connections while more waits than they take."""

    num_connections: int
    bytes_per_second: float
    resent_ratio: float


@dataclass(frozen=True)
class ConnectionCount:
    """Number of connections, and its reason for the log.

    `keeps_warm` keeps idle connections. Loss-based congestion control forgets its rate when idle and remembers its last
    loss, so that new connections fill a long link sooner.
    """

    count: int
    reason: str
    keeps_warm: bool = True


def not_sent_low_water(*, rtt_seconds: float) -> int:
    """Return the unsent bytes below which a connection takes new work.

    Measured at 5 Gbit/s and 2 ms with two connections: the larger value reduces the time of 64 MiB to 0.89 and the
    processor time of 1 GiB to 0.88. On eight connections of a slow long link it would delay urgent transfers.
    """
    return SHORT_NOT_SENT_LOW_WATER_BYTES if rtt_seconds < LONG_RTT_SECONDS else NOT_SENT_LOW_WATER_BYTES


def connection_count(
    *, rtt_seconds: float, congestion_control: str, throughput: LinkThroughput | None = None
) -> ConnectionCount:
    """Return how many connections a link should have.

    Bytes in flight need room for recovery and for uneven shares. The first number suits 10 Gbit/s. Later the number
    follows the throughput, if that asks for more and no queue overflows. It never follows a falling throughput, which
    may recover in a moment. Congestion control that takes every loss for congestion (cubic, reno) leaves a long link idle
    unless many connections share the losses.
    """
    rtt = f"a round trip of {rtt_seconds * 1e3:.1f} ms"
    if congestion_control not in RATE_BASED and rtt_seconds >= LONG_RTT_SECONDS:
        reason = f"{rtt}, and {congestion_control} slows down at every loss; bbr would not"
        return ConnectionCount(LOSS_BASED_CONNECTIONS, reason, keeps_warm=False)
    first = min(max(_needed(FIRST_ROOM * FILLED_BYTES_PER_SECOND * rtt_seconds), MIN_CONNECTIONS), MAX_CONNECTIONS)
    reason = f"{rtt}, {congestion_control}, {IN_FLIGHT_BYTES / 1e6:.1f} MB in flight on each"
    if throughput is None:
        return ConnectionCount(first, reason)
    num_present, rate, resent_ratio = throughput
    needed = min(_needed(MEASURED_ROOM * rate * rtt_seconds), MAX_MEASURED_CONNECTIONS)
    count = max(first, num_present, needed if resent_ratio <= RETRANSMIT_RATIO else 0)
    measured = f"{num_present} carry {rate / 1e6:.0f} MB/s, {resent_ratio:.1%} retransmitted"
    return ConnectionCount(count, f"{reason}; {measured}")


def _needed(in_flight_bytes: float) -> int:
    return math.ceil(in_flight_bytes / IN_FLIGHT_BYTES)


class RateSearch:
    """Decides when a BBR connection of a long link should search for a higher rate at once.

    There are two reasons:

    - Room. BBR keeps a rate that the link once refused, and tries a quarter more every eighth round trip. A link of 40 ms
      that has widened threefold is full only after two seconds. Bytes that wait here during short round trips show room.
    - A turn. BBR nearly stops for 0.2 s after ten seconds without a shorter round trip, on all connections at once. A
      search restarts these ten seconds, so the connections search in turn. There is no turn while round trips are long:
      a search would lengthen a queue, and BBR should measure a path that has become longer.

    On a short link eight round trips are over in a moment, and a search disturbs more than it finds.
    """

    def __init__(self) -> None:
        self._room_since: float | None = None
        self._turn_at: float | None = None

    def is_due(self, sample: LinkSample, *, num_connections: int) -> bool:
        """Return whether the next connection should search now."""
        if sample.min_rtt_seconds < LONG_RTT_SECONDS:
            return False
        has_room, is_turn = self._has_room(sample), self._is_turn(sample, num_connections)
        if has_room or is_turn:
            self._turn_at = sample.at
        return has_room or is_turn

    def _has_room(self, sample: LinkSample) -> bool:
        limit = NO_QUEUE_RATIO * sample.min_rtt_seconds + NO_QUEUE_RISE_SECONDS
        if not sample.queued_bytes or sample.rtt_seconds > limit:
            self._room_since = None
        elif self._room_since is None:
            self._room_since = sample.at
        elif sample.at - self._room_since >= ROOM_SECONDS:
            self._room_since = sample.at
            return True
        return False

    def _is_turn(self, sample: LinkSample, num_connections: int) -> bool:
        if self._turn_at is None:
            self._turn_at = sample.at
        has_queue = sample.rtt_seconds > LITTLE_QUEUE_RATIO * sample.min_rtt_seconds + NO_QUEUE_RISE_SECONDS
        if has_queue or not sample.unacknowledged_bytes or num_connections < MIN_SEARCH_CONNECTIONS:
            return False
        return sample.at - self._turn_at >= TURN_SECONDS / num_connections


class QueueDrain:
    """Decides when a long link sends a little less than its path carries, so that the queue on the path drains.

    Connections with BBR fill that queue together and lose what does not fit. Other transfers then wait for the queue and for
    retransmissions. A round trip that stays long shows a queue of others or a longer path, so the drain ends for a while.
    Measured at 1 Gbit/s and 40 ms: a prompt beside 50 of another tenant takes 1.8 instead of 2.3 times as long as alone.
    """

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._bytes_per_second = 0.0  # Rate estimate at the start: the drain lowers later ones.
        self._retry_at = -math.inf

    def limit(self, sample: LinkSample, *, bytes_per_second: float, is_shared: bool) -> float:
        """Return the rate that the link may send now; infinity without a drain.

        `bytes_per_second` is the rate estimate. `is_shared` tells whether several transfers are under way.
        """
        is_long = sample.rtt_seconds > LONG_QUEUE_RATIO * sample.min_rtt_seconds + NO_QUEUE_RISE_SECONDS
        has_wait = is_long and is_shared and sample.queued_bytes and sample.min_rtt_seconds >= LONG_RTT_SECONDS
        if not has_wait or not bytes_per_second:
            self._began_at = None
            return math.inf
        if sample.at < self._retry_at:
            return math.inf
        if self._began_at is None:
            self._began_at, self._bytes_per_second = sample.at, bytes_per_second
        if sample.at - self._began_at > DRAIN_ROUND_TRIPS * sample.min_rtt_seconds:
            self._began_at, self._retry_at = None, sample.at + DRAIN_RETRY_SECONDS
            return math.inf
        return DRAIN_RATIO * self._bytes_per_second
