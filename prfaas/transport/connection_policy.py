"""How many connections a link keeps, from its round trip and from what the kernel's congestion control does (pure).

One connection keeps at most its send buffer in flight, so a long link needs several; on a short one more than two only
overshoot its queue and cost processor time. Measured over emulated links: 10 Gbit/s and 2 ms sustain 0.998 of the link with
two connections and 0.87 of it on short transfers with eight; 5 Gbit/s and 30 ms need eight. Congestion control that takes
every loss for congestion (cubic, reno) leaves a long link idle unless many connections share the losses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FIRST_CONNECTIONS = 8  # dialled at once, before the round trip is known
MIN_CONNECTIONS, MAX_CONNECTIONS = 2, 8
LOSS_BASED_CONNECTIONS = 32  # on a long link; more of them overshoot its queue together and lose their start
LONG_RTT_SECONDS = 0.005
NOT_SENT_LOW_WATER_BYTES = 128 << 10  # a connection takes new work only when its own is nearly on the wire
SHORT_NOT_SENT_LOW_WATER_BYTES = 512 << 10  # on a short link, which takes the other faster than a thread wakes
FILLED_BYTES_PER_SECOND = 1.25e9  # 10 Gbit/s: what they should suffice for
IN_FLIGHT_BYTES = 4.7e6  # of a connection with a send buffer of 4 MiB, which the kernel doubles
RATE_BASED = frozenset({"bbr", "bbr2", "bbr3"})  # congestion control that follows the measured rate, not losses


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


def connection_count(*, rtt_seconds: float, congestion_control: str) -> ConnectionCount:
    """How many connections a link of this round trip should have.

    Twice the bandwidth-delay product in flight leaves room for recovery and for uneven shares.
    """
    rtt = f"a round trip of {rtt_seconds * 1e3:.1f} ms"
    if congestion_control not in RATE_BASED and rtt_seconds >= LONG_RTT_SECONDS:
        why = f"{rtt}, and {congestion_control} slows down at every loss; bbr would not"
        return ConnectionCount(LOSS_BASED_CONNECTIONS, why, keeps_warm=False)
    needed = math.ceil(2 * FILLED_BYTES_PER_SECOND * rtt_seconds / IN_FLIGHT_BYTES)
    count = min(max(needed, MIN_CONNECTIONS), MAX_CONNECTIONS)
    return ConnectionCount(count, f"{rtt}, {congestion_control}, {IN_FLIGHT_BYTES / 1e6:.1f} MB in flight on each")
