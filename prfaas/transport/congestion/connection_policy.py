"""How many connections a link keeps, by its round trip, by what they carry and by the kernel's congestion control (pure).

One connection keeps at most its send buffer in flight, so a long link needs several; on a short one more than two only
overshoot its queue and cost processor time. Measured over emulated links: 10 Gbit/s and 2 ms sustain 0.998 of the link with
two connections and 0.87 of it on short transfers with eight; 5 Gbit/s and 30 ms need eight. Beyond, it shows by what they
carry: at 5 Gbit/s and 80 ms eight carry 0.68 of the link, 16 0.90, 24 0.86 with 3.7 % sent again; at 2 Gbit/s and 200 ms
these carry 0.72, 0.87, and 0.85 with 10.8 % sent again. Congestion control that takes
every loss for congestion (cubic, reno) leaves a long link idle unless many connections share the losses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.transport.congestion.rate_estimator import LinkSample

FIRST_CONNECTIONS = 8  # dialled at once, before the round trip is known
MIN_CONNECTIONS, MAX_CONNECTIONS = 2, 8  # before it is known what the link carries
MAX_MEASURED_CONNECTIONS = 32  # that what it carries may ask for
MEASURED_ROOM, FIRST_ROOM = 1.5, 2.0  # in flight at most, over the bandwidth-delay product
OVERFLOW_RATIO = 0.03  # of the bytes, sent again: a queue that is too short for so many connections
LOSS_BASED_CONNECTIONS = 32  # on a long link; more of them overshoot its queue together and lose their start
LONG_RTT_SECONDS = 0.005
NOT_SENT_LOW_WATER_BYTES = 128 << 10  # a connection takes new work only when its own is nearly on the wire
SHORT_NOT_SENT_LOW_WATER_BYTES = 512 << 10  # on a short link, which takes the other faster than a thread wakes
FILLED_BYTES_PER_SECOND = 1.25e9  # 10 Gbit/s: what they should suffice for
IN_FLIGHT_BYTES = 4.7e6  # of a connection with a send buffer of 4 MiB, which the kernel doubles
RATE_BASED = frozenset({"bbr", "bbr2", "bbr3"})  # congestion control that follows the measured rate, not losses


class LinkThroughput(NamedTuple):
    """What a link's connections carried while more waited than they took."""

    num_connections: int
    bytes_per_second: float
    resent_ratio: float  # of the bytes sent


@dataclass(frozen=True)
class ConnectionCount:
    """A number of connections and the reason for it, for the log.

    `keeps_warm`: idle connections are worth keeping. Loss-based ones forget their rate when idle and remember their last
    loss, so that new ones fill a long link sooner.
    """

    count: int
    reason: str
    keeps_warm: bool = True


def not_sent_low_water(*, rtt_seconds: float) -> int:
    """How much a connection may hold unsent when it takes new work, in bytes.

    Measured at 5 Gbit/s and 2 ms, two connections: with the larger one 64 MiB take 0.89 of the time, and 1 GiB 0.88 of the
    processor time; eight connections of a slow long link would hold up an urgent transfer with it.
    """
    return SHORT_NOT_SENT_LOW_WATER_BYTES if rtt_seconds < LONG_RTT_SECONDS else NOT_SENT_LOW_WATER_BYTES


def connection_count(
    *, rtt_seconds: float, congestion_control: str, carried: LinkThroughput | None = None
) -> ConnectionCount:
    """How many connections a link of this round trip should have; `carried` None: it is not known what it carries.

    What may be in flight leaves room for recovery and for uneven shares. At first it is for 10 Gbit/s, with no more than
    MAX_CONNECTIONS; then for what they carry, where that asks for more of them and no queue overflows. What a link carries has
    an end, so has their number; it does not follow a rate that falls, which may be back in a moment.
    """
    rtt = f"a round trip of {rtt_seconds * 1e3:.1f} ms"
    if congestion_control not in RATE_BASED and rtt_seconds >= LONG_RTT_SECONDS:
        why = f"{rtt}, and {congestion_control} slows down at every loss; bbr would not"
        return ConnectionCount(LOSS_BASED_CONNECTIONS, why, keeps_warm=False)
    first = min(max(_needed(FIRST_ROOM * FILLED_BYTES_PER_SECOND * rtt_seconds), MIN_CONNECTIONS), MAX_CONNECTIONS)
    why = f"{rtt}, {congestion_control}, {IN_FLIGHT_BYTES / 1e6:.1f} MB in flight on each"
    if carried is None:
        return ConnectionCount(first, why)
    what = f"{carried.num_connections} carry {carried.bytes_per_second / 1e6:.0f} MB/s"
    needed = min(_needed(MEASURED_ROOM * carried.bytes_per_second * rtt_seconds), MAX_MEASURED_CONNECTIONS)
    most = needed if carried.resent_ratio <= OVERFLOW_RATIO else 0
    return ConnectionCount(
        max(first, carried.num_connections, most), f"{why}; {what}, {carried.resent_ratio:.1%} sent again"
    )


def _needed(in_flight_bytes: float) -> int:
    return math.ceil(in_flight_bytes / IN_FLIGHT_BYTES)


SETTLED_SECONDS = 2.0  # of being full: what has just begun is still finding its rate


class ThroughputMeter:
    """Takes the link meter's samples."""

    def __init__(self) -> None:
        self._last: LinkSample | None = None
        self._begin(0)

    def _begin(self, num_connections: int) -> None:
        self._num_connections = num_connections
        self._seconds = 0.0
        self._delivered_bytes = self._sent_bytes = self._retransmitted_bytes = 0

    def add(self, sample: LinkSample, *, num_connections: int) -> LinkThroughput | None:
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
        carried = LinkThroughput(
            num_connections,
            self._delivered_bytes / self._seconds,
            self._retransmitted_bytes / self._sent_bytes if self._sent_bytes else 0.0,
        )
        self._begin(num_connections)
        return carried


PATIENCE_SECONDS = 0.15  # of samples that all say that there is room
NO_QUEUE_RATIO, NO_QUEUE_RISE_SECONDS = 1.15, 0.001  # up to which a round trip counts as without a queue
TURN_SECONDS = 8.0  # from one turn of a connection to its next
LITTLE_QUEUE_RATIO = 1.5  # up to which a search adds no wait that anybody would notice
MIN_SEARCH_CONNECTIONS = 4  # of which one can be spared


class RateSearch:
    """Takes the link meter's samples."""

    def __init__(self) -> None:
        self._room_since: float | None = None
        self._turn_at: float | None = None

    def is_due(self, sample: LinkSample, *, num_connections: int) -> bool:
        """Whether one connection, the next in order, should search now."""
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
        elif sample.at - self._room_since >= PATIENCE_SECONDS:
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
