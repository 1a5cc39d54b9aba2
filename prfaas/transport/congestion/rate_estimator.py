"""Rate estimator of a link: what the link carries, for how long that is believed, and whether the link is congested.

A link shows its own rate only while bytes wait for it or arrive late. At other times it merely carries what it is given.
A recovered link looks slow until somebody sends, and nobody sends over a link that looks slow. So an estimate expires when
nothing has confirmed it for half a minute. The next transfers are the test: they show within a second that a link is slow.

Pure: callers pass seconds of a clock that only goes forward.
"""

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

# The threshold should follow a link within a minute. Each expired estimate costs a second of a failed test.
FORGET_SECONDS = 30.0
BEHIND_SECONDS = 0.5  # No queue that a well-filled link needs delays bytes by more than this beyond a round trip.
SPAN_SECONDS = 1.0  # Span of the lower bound while the link never falls idle.
SHORTEST_SECONDS = 0.05  # Bytes that arrive together only show that they took less than this.
FRESH_SEGMENTS = 16  # After so many segments the kernel's mean of a twelvefold round trip has fallen to 2.5 times.
RTT_INFLATION = 2.5  # Congestion: a round trip above this multiple of its minimum ...
RTT_RISE_SECONDS = 0.005  # ... and by this much, since a busy host alone multiplies short round trips.
WINDOW_SECONDS = 0.3
PEAK_SECONDS = 0.6  # The rate is the highest of the windows that ended within this time.
QUEUE_SECONDS = 0.5  # Congestion: the waiting bytes would take longer than this.
RETRANSMIT_RATIO = 0.03  # Congestion: a larger share of retransmitted bytes shows a queue that overflows.
LOSS_SEGMENTS = 64  # Of fewer segments, a single probing retransmission would be too large a share.
CONFIRMED_RATIO = 0.8  # A lower bound of this share of the estimate confirms it.
STEADY_RATIO = 1.25  # BBR regards a link as full when its rate grows by less.
CongestionReason = Literal["queue", "loss", "rtt"]
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class RateEstimate:
    """Estimate that expires unless it is confirmed."""

    bytes_per_second: float = 0.0
    confirmed_at: float = -math.inf

    def at(self, now: float) -> float:
        """Return the estimate in bytes per second; 0 if it has expired."""
        return self.bytes_per_second if now - self.confirmed_at < FORGET_SECONDS else 0.0


class _FlightRecord(NamedTuple):
    """Bytes in flight, with the totals of written and delivered bytes before them."""

    at: float
    num_bytes: int
    written_bytes: int
    delivered_bytes: int


class RateBounds:
    """Bounds of a link's rate, from the times at which payload was written to connections and acknowledged.

    Bytes count as delivered in the order in which they were written.
    """

    def __init__(self) -> None:
        self._written_bytes = 0
        self._delivered_bytes = 0
        self._under_way: deque[_FlightRecord] = deque()
        # Start of the span of the lower bound, and the bytes written before it.
        self._span_at, self._span_bytes = 0.0, 0
        self._least = 0.0

    def on_written(self, num_bytes: int, *, now: float) -> None:
        """Note bytes that a connection takes."""
        if not self._under_way:
            self._begin_span(now)
        self._under_way.append(_FlightRecord(now, num_bytes, self._written_bytes, self._delivered_bytes))
        self._written_bytes += num_bytes

    def _begin_span(self, now: float) -> None:
        self._span_at, self._span_bytes = now, self._written_bytes

    def on_delivered(self, num_bytes: int, *, rtt_seconds: float, now: float) -> None:
        """Note bytes that the peer acknowledges."""
        self._delivered_bytes = min(self._delivered_bytes + num_bytes, self._written_bytes)
        while (
            self._under_way and self._under_way[0].written_bytes + self._under_way[0].num_bytes <= self._delivered_bytes
        ):
            self._under_way.popleft()
        seconds = now - self._span_at
        carried = (self._delivered_bytes - self._span_bytes) / max(SHORTEST_SECONDS, seconds - rtt_seconds)
        self._least = max(self._least, carried)
        if carried >= 0 and seconds >= SPAN_SECONDS:
            self._begin_span(now)

    def restart(self, num_bytes: int, *, now: float) -> None:
        """Restart after a lost connection, with `num_bytes` in flight on the others."""
        self._written_bytes = self._delivered_bytes
        self._under_way.clear()
        if num_bytes:
            self.on_written(num_bytes, now=now)
        self._begin_span(now)

    def take_lower_bound(self) -> float:
        """Return the highest lower bound since the previous call; 0 if nothing was delivered."""
        least, self._least = self._least, 0.0
        return least

    def most(self, *, rtt_seconds: float, num_connections: int, now: float, out_of_order_bytes: int = 0) -> float:
        """Return the upper bound; infinity while nothing is late.

        `out_of_order_bytes` have reached the peer's kernel, but wait there behind a lost segment.
        """
        oldest = self._under_way[0] if self._under_way else None
        seconds = now - oldest.at - rtt_seconds if oldest else 0.0
        if oldest is None or seconds < BEHIND_SECONDS:
            return math.inf
        under_way = self._written_bytes - self._delivered_bytes
        not_landed = min(under_way, out_of_order_bytes + oldest.num_bytes * num_connections)
        return (self._delivered_bytes - oldest.delivered_bytes + not_landed) / seconds


class RoundTrip(NamedTuple):
    """Present and minimum round-trip time of one connection; 0 if unknown."""

    seconds: float = 0.0
    min_seconds: float = 0.0

    @property
    def pressure(self) -> float:
        """Ratio to the longest round-trip time of a path without a queue."""
        return self.seconds / max(RTT_INFLATION * self.min_seconds, self.min_seconds + RTT_RISE_SECONDS)

    @property
    def is_long(self) -> bool:
        """Return whether something waits on the path."""
        return self.min_seconds > 0 and self.pressure > 1


class RoundTripTracker(Generic[K]):
    """Round-trip time of a link, from those of its connections that measure it at present.

    An idle connection keeps the round-trip time of its last burst, which says nothing about the link now.
    """

    def __init__(self) -> None:
        self._fresh_segments: dict[K, int] = {}  # Segments that each busy connection has received since it was idle.

    def observe(self, num_segments: Mapping[K, int], *, in_flight: Sequence[K]) -> None:
        """Note the segments that each connection has received, and the connections with bytes in flight."""
        busy = {key for key, count in num_segments.items() if count} | set(in_flight)
        self._fresh_segments = {key: self._fresh_segments.get(key, 0) + num_segments.get(key, 0) for key in busy}

    def highest(self, trips: Mapping[K, RoundTrip]) -> RoundTrip:
        """Return the round trip that has risen most on a busy connection, else the minimum of all connections."""
        fresh = [trip for key, trip in trips.items() if self._fresh_segments.get(key, 0) >= FRESH_SEGMENTS]
        if fresh:
            return max(fresh, key=lambda trip: trip.pressure)
        least = min((trip.min_seconds for trip in trips.values()), default=0.0)
        return RoundTrip(least, least)


class LinkSample(NamedTuple):
    """Link at one moment. Counts and times are totals over all connections that the link ever had."""

    at: float
    delivered_bytes: int  # Delivered to the peer's kernel.
    sent_bytes: int
    retransmitted_bytes: int
    queued_bytes: int  # Ready, but not yet assigned to a connection.
    unacknowledged_bytes: int
    rtt_seconds: float  # Of the busy connection on which it has risen most.
    min_rtt_seconds: float  # Minimum on the same connection.
    least_bytes_per_second: float = 0.0  # Lower bound of the rate.
    most_bytes_per_second: float = math.inf  # Upper bound of the rate.
    segment_bytes: int = 0


@dataclass(frozen=True)
class LinkHealth:
    """Findings about a link. Ratios refer to the last third of a second."""

    achievable_bytes_per_second: float = 0.0  # Rate estimate; 0 if unknown.
    queue_seconds: float = 0.0  # Time that all waiting bytes take at this rate.
    congestion: CongestionReason | None = None
    utilization_ratio: float = 0.0  # Used share of the rate estimate; 0 if unknown.
    resent_ratio: float = 0.0  # Retransmitted share of the bytes.


class RateEstimator:
    """Turns samples, taken every few tens of milliseconds, into a rate estimate and the health of a link."""

    def __init__(self) -> None:
        self.health = LinkHealth()
        self._samples: deque[LinkSample] = deque()
        self._saturated_rates: deque[tuple[float, float]] = deque()  # Ends of full windows, and their rates.
        self._estimate = RateEstimate()

    @property
    def is_saturated(self) -> bool:
        """Return whether bytes waited throughout the window, so that its rate is the link's own."""
        return bool(self._saturated_rates)

    @property
    def is_steady(self) -> bool:
        """Return whether all recent windows, two of which do not overlap, carried about the same.

        Excludes a start, whose rate grows, and a burst into a buffer.
        """
        if not self._saturated_rates:
            return False
        rates = [rate for _, rate in self._saturated_rates]
        seconds = self._saturated_rates[-1][0] - self._saturated_rates[0][0]
        return seconds >= WINDOW_SECONDS and 0 < max(rates) <= STEADY_RATIO * min(rates)

    def add(self, sample: LinkSample) -> None:
        """Update `health`."""
        self._samples.append(sample)
        while len(self._samples) > 2 and sample.at - self._samples[1].at >= WINDOW_SECONDS:
            self._samples.popleft()
        oldest = self._samples[0]
        rate = self._rate(sample)
        queue_seconds = (sample.queued_bytes + sample.unacknowledged_bytes) / rate if rate else 0.0
        seconds = sample.at - oldest.at
        sent = sample.sent_bytes - oldest.sent_bytes
        resent_ratio = (sample.retransmitted_bytes - oldest.retransmitted_bytes) / sent if sent > 0 else 0.0
        loss_ratio = resent_ratio if sent >= LOSS_SEGMENTS * sample.segment_bytes else 0.0
        carried = (sample.delivered_bytes - oldest.delivered_bytes) / seconds if seconds else 0.0
        self.health = LinkHealth(
            rate,
            queue_seconds,
            _congestion(sample, queue_seconds, loss_ratio),
            utilization_ratio=min(1.0, carried / rate) if rate else 0.0,
            resent_ratio=resent_ratio,
        )

    def _rate(self, sample: LinkSample) -> float:
        saturated, known = self._saturated_rate(sample), self._estimate.at(sample.at)
        least, most = sample.least_bytes_per_second, sample.most_bytes_per_second
        is_bound = most < math.inf
        if saturated:
            rate = min(saturated, most)
        elif is_bound:
            rate = max(min(known or most, most), least)
        elif known:
            rate = max(known, least)
        else:
            return 0.0
        if saturated or is_bound or least >= CONFIRMED_RATIO * rate:
            self._estimate = RateEstimate(rate, sample.at)
        return rate

    def _saturated_rate(self, sample: LinkSample) -> float | None:
        """Return the rate of bytes that waited throughout the window, or None if none did."""
        oldest = self._samples[0]
        seconds = sample.at - oldest.at
        if not all(sample.queued_bytes for sample in self._samples):
            self._saturated_rates.clear()
            return None
        if seconds >= WINDOW_SECONDS:
            self._saturated_rates.append((sample.at, (sample.delivered_bytes - oldest.delivered_bytes) / seconds))
        while self._saturated_rates and sample.at - self._saturated_rates[0][0] > PEAK_SECONDS:
            self._saturated_rates.popleft()
        return max((rate for _, rate in self._saturated_rates), default=None)


def _congestion(sample: LinkSample, queue_seconds: float, loss_ratio: float) -> CongestionReason | None:
    if not sample.queued_bytes + sample.unacknowledged_bytes:
        return None
    if loss_ratio > RETRANSMIT_RATIO:
        return "loss"
    if queue_seconds > QUEUE_SECONDS:
        return "queue"
    return "rtt" if RoundTrip(sample.rtt_seconds, sample.min_rtt_seconds).is_long else None
