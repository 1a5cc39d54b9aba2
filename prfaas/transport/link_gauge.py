"""What a link's connections add up to, and what follows from it: which one searches a higher rate, how chunks are packed."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection
from dataclasses import replace

from prfaas.transport.connection_policy import Carried
from prfaas.transport.connection_review import ConnectionReview
from prfaas.transport.line import Line
from prfaas.transport.link_meter import LinkHealth, LinkMeter, LinkSample
from prfaas.transport.link_state import LinkState
from prfaas.transport.outbox import Outbox
from prfaas.transport.packing_choice import LinkPace, PackingChoice
from prfaas.transport.rate_bounds import RateBounds
from prfaas.transport.rate_budget import Use
from prfaas.transport.rate_search import RateSearch
from prfaas.transport.round_trips import RoundTrip, RoundTrips
from prfaas.transport.tcp_info import Growth, TcpInfo


class LinkGauge:
    """No threads and no locks of its own: `sender.Link` holds its lock around every call."""

    def __init__(self) -> None:
        self.packing = PackingChoice(num_processors=len(os.sched_getaffinity(0)))
        self.bounds = RateBounds()
        self.min_rtt_seconds = 0.0  # of all connections, at the last sample
        self._round_trips: RoundTrips[Line] = RoundTrips()
        self._grown = Growth()  # over all connections
        self._connection_seconds, self._measured_at = 0.0, 0.0
        self._meter, self._rate_search, self._review = LinkMeter(), RateSearch(), ConnectionReview()
        self._num_searches = 0
        self.is_probing = False  # what waits is a probe's: what it finds is not said before it has ended
        self.has_found = False  # by a probe, what the link carries
        self._least_bytes_per_second = 0.0  # that it carries, as the probe under way has shown

    @property
    def sent_bytes(self) -> int:
        """By the kernel, headers left out."""
        return self._grown.sent_bytes

    @property
    def retransmitted_bytes(self) -> int:
        """Of those."""
        return self._grown.retransmitted_bytes

    @property
    def health(self) -> LinkHealth:
        """In bytes of payload, of which the wire carries fewer where they are packed."""
        its, ratio = LinkHealth() if self.is_probing else self._meter.health, self.packing.packed_ratio
        return replace(
            its,
            achievable_bytes_per_second=its.achievable_bytes_per_second / ratio,
            least_bytes_per_second=its.least_bytes_per_second / ratio,
        )

    def begin_probe(self) -> None:
        """Bytes wait from here on to find out what the link carries."""
        self.is_probing, self.has_found, self._least_bytes_per_second = True, False, 0.0
        self._meter.source = "probe"

    def end_probe(self, now: float) -> None:
        """They wait no more. Where the rate was still growing, or too little waited, the link carries at least what it did."""
        if not self.has_found:
            since_then = self.packing.packed_ratio * self.bounds.take_least()
            least = max(self._least_bytes_per_second, since_then)
            self._meter.forget(least_bytes_per_second=least, now=now)
        self.is_probing = False

    def opened(self) -> None:
        """A transfer has been opened. Until then what still arrives is the last probe's."""
        if not self.is_probing:
            self._meter.source = "transfers"

    def use(self, *, is_busy: bool) -> Use:
        """What the link does, for the budgets that it sends from."""
        return Use(is_busy, self._meter.is_saturated, self._grown.delivered_bytes, self._grown.retransmitted_bytes)

    def measure(self, now: float, lines: Collection[Line], outbox: Outbox) -> Carried | None:
        """Take a sample of every connection; returns what they carry, where that is settled anew."""
        infos = [(line, info) for line in lines if (info := line.tcp_info()) is not None]
        self._count(infos, now)
        self._connection_seconds += len(infos) * (now - self._measured_at)
        self._measured_at = now
        sample = self._sample(now, infos, outbox)
        self._meter.add(sample)
        if self.is_probing:
            self.has_found |= self._meter.is_steady
            self._least_bytes_per_second = max(self._least_bytes_per_second, sample.least_bytes_per_second)
        if infos and self._rate_search.is_due(sample, num_connections=len(infos)):
            self._num_searches += 1  # which one searches goes round
            infos[self._num_searches % len(infos)][0].search_rate()
        carried = self._review.add(sample, num_connections=len(infos))
        if self.is_probing:
            return carried
        rate, is_full = self._meter.health.achievable_bytes_per_second, outbox.queued_bytes > 0
        self.packing.observe(LinkPace(now, rate, len(infos), is_full, outbox.acknowledged_bytes))
        return carried

    def _count(self, infos: list[tuple[Line, TcpInfo]], now: float) -> None:
        heard: dict[Line, int] = {}
        for line, info in infos:
            self._grown = Growth(*map(operator.add, self._grown, info.grown_since(line.seen)))
            heard[line] = info.heard_since(line.seen)
            line.seen = info
            line.recent.add(info, now)
        self._round_trips.heard(heard, in_flight=[line for line, _ in infos if line.in_flight_bytes])

    def round_trip(self, infos: list[tuple[Line, TcpInfo]]) -> RoundTrip:
        """Of the connection that is used and on which it has risen most, by these figures of all of them."""
        return self._round_trips.of({line: RoundTrip(info.rtt_seconds, info.min_rtt_seconds) for line, info in infos})

    def state(self, lines: Collection[Line], outbox: Outbox, *, peer: str, address: str, is_down: bool) -> LinkState:
        """What there is to say of the link; costs a few microseconds a connection."""
        known = [(line, info) for line in lines if (info := line.tcp_info()) is not None]
        infos, round_trip = [info for _, info in known], self.round_trip(known)
        return LinkState(
            peer=peer,
            address=address,
            num_connections=len(lines),
            is_down=is_down,
            num_transfers=outbox.num_transfers,
            queued_bytes=outbox.queued_bytes,
            unacknowledged_bytes=sum(line.in_flight_bytes for line in lines),
            unsent_bytes=sum(info.unsent_bytes for info in infos),
            acknowledged_bytes=outbox.acknowledged_bytes,
            rtt_seconds=round_trip.seconds,
            min_rtt_seconds=round_trip.min_seconds,
            sent_bytes=self.sent_bytes,
            retransmitted_bytes=self.retransmitted_bytes,
            segment_bytes=max((info.segment_bytes for info in infos), default=0),
            **vars(self.health),
            is_probing=self.is_probing,
            packing=f"{way.codec}/{way.width}" if (way := self.packing.way) else "",
            saved_bytes=self.packing.saved_bytes,
            lossy_fp8=any(line.casts for line in lines),
            delivery_bytes_per_second=sum(info.delivery_bytes_per_second for info in infos),
            pacing_bytes_per_second=sum(info.max_pacing_bytes_per_second for info in infos),
        )

    def _sample(self, now: float, infos: list[tuple[Line, TcpInfo]], outbox: Outbox) -> LinkSample:
        ratio = self.packing.packed_ratio  # payload takes less of the link
        rtt = self.min_rtt_seconds = min((info.min_rtt_seconds for _, info in infos), default=0.0)
        most = self.bounds.most(
            rtt_seconds=rtt,
            num_connections=max(1, len(infos)),
            now=now,
            out_of_order_bytes=int(sum(info.out_of_order_bytes for _, info in infos) / ratio),
        )
        trip = self.round_trip(infos)
        return LinkSample(
            now,
            delivered_bytes=self._grown.delivered_bytes,
            sent_bytes=self.sent_bytes,
            retransmitted_bytes=self.retransmitted_bytes,
            queued_bytes=int(ratio * outbox.queued_bytes),
            unacknowledged_bytes=int(ratio * sum(line.in_flight_bytes for line, _ in infos)),
            rtt_seconds=trip.seconds,
            min_rtt_seconds=trip.min_seconds,
            least_bytes_per_second=ratio * self.bounds.take_least(),
            most_bytes_per_second=ratio * most,
            connection_seconds=self._connection_seconds,
            busy_seconds=self._grown.busy_seconds,
            receiver_limited_seconds=self._grown.receiver_limited_seconds,
            buffer_limited_seconds=self._grown.buffer_limited_seconds,
            segment_bytes=max((info.segment_bytes for _, info in infos), default=0),
        )
