"""What a link is known to carry at most, and for how long that is believed (pure).

Only what was late or waited shows a link's own rate; else it merely carries what it is given. That it is well again after a
fall shows only when somebody sends, and who takes the link for slow sends nothing. So what nothing has confirmed for half a
minute is known no more: the next transfers are the test, and show within a second where the link is still narrow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

# t is to be back within a minute of the link; of each such time a second is spent on a failed test.
FORGET_SECONDS = 30.0
RateSource = Literal["transfers", "probe"]  # whose bytes waited


@dataclass(frozen=True)
class RateEstimate:
    """In bytes per second; 0: not known. Times are seconds on a clock that only goes forward."""

    bytes_per_second: float = 0.0
    confirmed_at: float = float("-inf")
    source: RateSource = "transfers"

    def at(self, now: float) -> float:
        """What is left of it."""
        return self.bytes_per_second if now - self.confirmed_at < FORGET_SECONDS else 0.0


BEHIND_SECONDS = 0.5  # later than a round trip: no queue that a well filled link needs is so long
SPAN_SECONDS = 1.0  # over which the lower bound is taken while the link never falls idle
SHORTEST_SECONDS = 0.05  # bytes that land together say no more than that they took less than this


class _Handed(NamedTuple):
    """Bytes under way, and how many had been handed over and had landed before them."""

    at: float
    num_bytes: int
    handed_bytes: int
    landed_bytes: int


class RateBounds:
    """Of one link, in bytes per second of payload. Bytes count as landing in the order in which they were handed over."""

    def __init__(self) -> None:
        self._handed_bytes = 0
        self._landed_bytes = 0
        self._under_way: deque[_Handed] = deque()
        self._span_at, self._span_bytes = 0.0, 0  # since when the lower bound is taken, and what was handed over before
        self._least = 0.0

    def handed(self, num_bytes: int, *, now: float) -> None:
        """A connection takes so many bytes."""
        if not self._under_way:
            self._begin_span(now)
        self._under_way.append(_Handed(now, num_bytes, self._handed_bytes, self._landed_bytes))
        self._handed_bytes += num_bytes

    def _begin_span(self, now: float) -> None:
        self._span_at, self._span_bytes = now, self._handed_bytes

    def landed(self, num_bytes: int, *, rtt_seconds: float, now: float) -> None:
        """The peer acknowledges so many bytes."""
        self._landed_bytes = min(self._landed_bytes + num_bytes, self._handed_bytes)
        while self._under_way and self._under_way[0].handed_bytes + self._under_way[0].num_bytes <= self._landed_bytes:
            self._under_way.popleft()
        seconds = now - self._span_at
        carried = (self._landed_bytes - self._span_bytes) / max(SHORTEST_SECONDS, seconds - rtt_seconds)
        self._least = max(self._least, carried)
        if carried >= 0 and seconds >= SPAN_SECONDS:
            self._begin_span(now)

    def restart(self, num_bytes: int, *, now: float) -> None:
        """A connection was lost; so many bytes are under way on the others."""
        self._handed_bytes = self._landed_bytes
        self._under_way.clear()
        if num_bytes:
            self.handed(num_bytes, now=now)
        self._begin_span(now)

    def take_least(self) -> float:
        """The highest lower bound since this was asked last; 0 when nothing landed."""
        least, self._least = self._least, 0.0
        return least

    def most(self, *, rtt_seconds: float, num_connections: int, now: float, out_of_order_bytes: int = 0) -> float:
        """The upper bound; infinite while nothing is late. `out_of_order_bytes` have been carried and have not landed."""
        oldest = self._under_way[0] if self._under_way else None
        seconds = now - oldest.at - rtt_seconds if oldest else 0.0
        if oldest is None or seconds < BEHIND_SECONDS:
            return math.inf
        under_way = self._handed_bytes - self._landed_bytes
        not_landed = min(under_way, out_of_order_bytes + oldest.num_bytes * num_connections)
        return (self._landed_bytes - oldest.landed_bytes + not_landed) / seconds


T = TypeVar("T", bound=Hashable)
FRESH_SEGMENTS = 16  # heard: after so many, twelve times the least has come down to two and a half
RTT_INFLATION = 2.5  # over the smallest round trip
RTT_RISE_SECONDS = 0.005  # and by at least so much: within a datacenter a busy host alone multiplies a round trip


class RoundTrip(NamedTuple):
    """Of one connection, at present and at least; 0: not known."""

    seconds: float = 0.0
    min_seconds: float = 0.0

    @property
    def pressure(self) -> float:
        """Its share of what a way without a queue takes at most."""
        return self.seconds / max(RTT_INFLATION * self.min_seconds, self.min_seconds + RTT_RISE_SECONDS)

    @property
    def is_long(self) -> bool:
        """Whether something waits on the way."""
        return self.min_seconds > 0 and self.pressure > 1


class RoundTripTracker(Generic[T]):
    """Of one link; its connections are named by whatever the caller has for them."""

    def __init__(self) -> None:
        self._fresh: dict[T, int] = {}  # segments that each has heard since it was idle

    def heard(self, num_segments: Mapping[T, int], *, in_flight: Sequence[T]) -> None:
        """How many each has heard since this was called last, and on which something is under way."""
        busy = {line for line, count in num_segments.items() if count} | set(in_flight)
        self._fresh = {line: self._fresh.get(line, 0) + num_segments.get(line, 0) for line in busy}

    def of(self, known: Mapping[T, RoundTrip]) -> RoundTrip:
        """That which has risen most, of those that are measured at present; where none is, the least there ever was."""
        fresh = [its for line, its in known.items() if self._fresh.get(line, 0) >= FRESH_SEGMENTS]
        if fresh:
            return max(fresh, key=lambda its: its.pressure)
        least = min((its.min_seconds for its in known.values()), default=0.0)
        return RoundTrip(least, least)


WINDOW_SECONDS = 0.3
PEAK_SECONDS = 0.6  # the rate is the highest of the windows that ended in it
QUEUE_SECONDS = 0.5  # what waits would take longer than this
RETRANSMIT_RATIO = 0.03  # of the bytes sent in the window
LOSS_SEGMENTS = 64  # sent in it at least: of fewer, one that TCP sends again to be sure would be too large a share
CONFIRMED_RATIO = 0.8  # a lower bound of so much of a rate confirms it
STEADY_RATIO = 1.25  # BBR takes a link for full where its rate grows by less
CongestionReason = Literal["queue", "loss", "rtt"]
LinkLimit = Literal["application", "receiver_window", "send_buffer", "network"]


class LinkSample(NamedTuple):
    """A link at one moment; byte counts grow from the link's start, over all connections it ever had."""

    at: float  # seconds on a clock that only goes forward
    delivered_bytes: int  # to the peer's kernel
    sent_bytes: int
    retransmitted_bytes: int
    queued_bytes: int  # ready, and not yet handed to the kernel
    unacknowledged_bytes: int
    rtt_seconds: float  # of the connection on which it has risen most, and the least of that one
    min_rtt_seconds: float
    least_bytes_per_second: float = 0.0  # between which its rate lies
    most_bytes_per_second: float = math.inf
    connection_seconds: float = 0.0  # over all connections; of those, with something to send, and held up by either end
    busy_seconds: float = 0.0
    receiver_limited_seconds: float = 0.0
    buffer_limited_seconds: float = 0.0
    segment_bytes: int = 0


@dataclass(frozen=True)
class LinkHealth:
    """`achievable_bytes_per_second` is 0 while the link's own rate is not known, else what `rate_source` showed; `congestion`
    None: it is not choked. `least_bytes_per_second`: while its rate is not known, what a probe has shown it to carry at least.

    Ratios are over the last third of a second. So is `limit`, what its connections mostly waited for; None: it has none.
    """

    achievable_bytes_per_second: float = 0.0
    queue_seconds: float = 0.0
    congestion: CongestionReason | None = None
    utilization_ratio: float = 0.0  # of the achievable rate; 0 while that is not known
    resent_ratio: float = 0.0  # of the bytes sent
    limit: LinkLimit | None = None
    rate_source: RateSource | None = None
    least_bytes_per_second: float = 0.0


class RateEstimator:
    """Takes a sample every few tens of milliseconds."""

    def __init__(self) -> None:
        self._samples: deque[LinkSample] = deque()
        self._saturated_rates: deque[tuple[float, float]] = deque()  # when a window ended, and what it carried
        self._belief, self._least = RateEstimate(), RateEstimate()
        self.health = LinkHealth()
        self.source: RateSource = "transfers"  # of the bytes that wait at present

    @property
    def is_saturated(self) -> bool:
        """Whether the rate is what the link carries at most: bytes waited throughout the window."""
        return bool(self._saturated_rates)

    @property
    def is_steady(self) -> bool:
        """Whether all windows, two of which share nothing, carried about the same: no start, whose rate grows, and no burst."""
        if not self._saturated_rates:
            return False
        rates = [rate for _, rate in self._saturated_rates]
        seconds = self._saturated_rates[-1][0] - self._saturated_rates[0][0]
        return seconds >= WINDOW_SECONDS and 0 < max(rates) <= STEADY_RATIO * min(rates)

    def forget(self, *, least_bytes_per_second: float, now: float) -> None:
        """What was found says no more of the link than that it carries so much."""
        self._belief, self._least = RateEstimate(), RateEstimate(least_bytes_per_second, now, "probe")
        self._saturated_rates.clear()
        self._samples.clear()
        self.health = LinkHealth(least_bytes_per_second=least_bytes_per_second)

    def add(self, sample: LinkSample) -> None:
        """Update `health`."""
        self._samples.append(sample)
        while len(self._samples) > 2 and sample.at - self._samples[1].at >= WINDOW_SECONDS:
            self._samples.popleft()
        rate = self._rate(sample)
        waiting = sample.queued_bytes + sample.unacknowledged_bytes
        queue_seconds = waiting / rate if rate else 0.0
        oldest = self._samples[0]
        resent = sample.retransmitted_bytes - oldest.retransmitted_bytes
        seconds = sample.at - oldest.at
        sent = sample.sent_bytes - oldest.sent_bytes
        ratio = resent / sent if sent > 0 else 0.0
        carried = (sample.delivered_bytes - oldest.delivered_bytes) / seconds if seconds else 0.0
        self.health = LinkHealth(
            rate,
            queue_seconds,
            _congestion(sample, queue_seconds, ratio if sent >= LOSS_SEGMENTS * sample.segment_bytes else 0.0),
            utilization_ratio=min(1.0, carried / rate) if rate else 0.0,
            resent_ratio=ratio,
            limit=_limit(oldest, sample),
            rate_source=self._belief.source if rate else None,
            least_bytes_per_second=0.0 if rate else self._least.at(sample.at),
        )

    def _rate(self, sample: LinkSample) -> float:
        saturated, known = self._saturated_rate(sample), self._belief.at(sample.at)
        least, most = sample.least_bytes_per_second, sample.most_bytes_per_second
        is_bound = most < math.inf and self.source == "transfers"  # the start of a probe is late on any link
        if saturated:
            rate = min(saturated, most)
        elif is_bound:
            rate = max(min(known or most, most), least)
        elif known:
            rate = max(known, least)
        else:
            return 0.0
        if saturated or is_bound or least >= CONFIRMED_RATIO * rate:
            self._belief = RateEstimate(rate, sample.at, self.source)
        return rate

    def _saturated_rate(self, sample: LinkSample) -> float | None:
        """What the link carries, by bytes that waited throughout the window; None where none did."""
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


def _congestion(sample: LinkSample, queue_seconds: float, retransmit_ratio: float) -> CongestionReason | None:
    if not sample.queued_bytes + sample.unacknowledged_bytes:
        return None
    if retransmit_ratio > RETRANSMIT_RATIO:
        return "loss"
    if queue_seconds > QUEUE_SECONDS:
        return "queue"
    return "rtt" if RoundTrip(sample.rtt_seconds, sample.min_rtt_seconds).is_long else None


def _limit(oldest: LinkSample, sample: LinkSample) -> LinkLimit | None:
    return limit_of(
        sample.connection_seconds - oldest.connection_seconds,
        busy_seconds=sample.busy_seconds - oldest.busy_seconds,
        receiver_limited_seconds=sample.receiver_limited_seconds - oldest.receiver_limited_seconds,
        buffer_limited_seconds=sample.buffer_limited_seconds - oldest.buffer_limited_seconds,
    )


def limit_of(
    seconds: float, *, busy_seconds: float, receiver_limited_seconds: float, buffer_limited_seconds: float
) -> LinkLimit | None:
    """What connections spent most of these seconds with: having nothing to send, or waiting for one of the others."""
    if seconds <= 0:
        return None
    shares: dict[LinkLimit, float] = {
        "application": seconds - busy_seconds,
        "receiver_window": receiver_limited_seconds,
        "send_buffer": buffer_limited_seconds,
        "network": busy_seconds - receiver_limited_seconds - buffer_limited_seconds,
    }
    return max(shares, key=shares.__getitem__)
