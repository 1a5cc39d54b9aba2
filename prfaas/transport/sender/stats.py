"""A link's figures: what the kernel says of each connection, summed up."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Collection, Hashable
from dataclasses import asdict, dataclass, replace
from typing import Any

from prfaas import logs
from prfaas.transport.codec.packing import LinkLoad, PackingPolicy
from prfaas.transport.congestion.connection_policy import LinkThroughput, RateSearch, ThroughputMeter
from prfaas.transport.congestion.rate_budget import LinkUsage, RateBudget
from prfaas.transport.congestion.rate_estimator import (
    CongestionReason,
    LinkHealth,
    LinkLimit,
    LinkSample,
    RateBounds,
    RateEstimator,
    RateSource,
    RoundTrip,
    RoundTripTracker,
)
from prfaas.transport.net.sockets import Growth, TcpInfo
from prfaas.transport.sender.chunker import ChunkSize
from prfaas.transport.sender.connection_worker import ConnectionWorker
from prfaas.transport.sender.outbox import Outbox


@dataclass(frozen=True)
class LinkStats:
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


class LinkMonitor:
    """No threads and no locks of its own: `sender.Link` holds its lock around every call."""

    def __init__(self) -> None:
        self.packing = PackingPolicy(num_processors=len(os.sched_getaffinity(0)))
        self.bounds = RateBounds()
        self.min_rtt_seconds = 0.0  # of all connections, at the last sample
        self._round_trips: RoundTripTracker[ConnectionWorker] = RoundTripTracker()
        self._grown = Growth()  # over all connections
        self._connection_seconds, self._measured_at = 0.0, 0.0
        self._meter, self._rate_search, self._review = RateEstimator(), RateSearch(), ThroughputMeter()
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

    def use(self, *, is_busy: bool) -> LinkUsage:
        """What the link does, for the budgets that it sends from."""
        return LinkUsage(
            is_busy, self._meter.is_saturated, self._grown.delivered_bytes, self._grown.retransmitted_bytes
        )

    def measure(self, now: float, lines: Collection[ConnectionWorker], outbox: Outbox) -> LinkThroughput | None:
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
        self.packing.observe(LinkLoad(now, rate, len(infos), is_full, outbox.acknowledged_bytes))
        return carried

    def _count(self, infos: list[tuple[ConnectionWorker, TcpInfo]], now: float) -> None:
        heard: dict[ConnectionWorker, int] = {}
        for line, info in infos:
            self._grown = Growth(*map(operator.add, self._grown, info.grown_since(line.seen)))
            heard[line] = info.heard_since(line.seen)
            line.seen = info
            line.recent.add(info, now)
        self._round_trips.heard(heard, in_flight=[line for line, _ in infos if line.in_flight_bytes])

    def round_trip(self, infos: list[tuple[ConnectionWorker, TcpInfo]]) -> RoundTrip:
        """Of the connection that is used and on which it has risen most, by these figures of all of them."""
        return self._round_trips.of({line: RoundTrip(info.rtt_seconds, info.min_rtt_seconds) for line, info in infos})

    def state(
        self, lines: Collection[ConnectionWorker], outbox: Outbox, *, peer: str, address: str, is_down: bool
    ) -> LinkStats:
        """What there is to say of the link; costs a few microseconds a connection."""
        known = [(line, info) for line in lines if (info := line.tcp_info()) is not None]
        infos, round_trip = [info for _, info in known], self.round_trip(known)
        return LinkStats(
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

    def _sample(self, now: float, infos: list[tuple[ConnectionWorker, TcpInfo]], outbox: Outbox) -> LinkSample:
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


_log = logs.get("transport")
PACE_STEP_RATIO = 0.02  # smaller changes of a share are not told to the kernel
MUCH = 4  # times as large, or as small: a change of the chunk size that the log has


class LinkPacer:
    """No threads and no locks of its own: `sender.Link` holds its lock around every call."""

    def __init__(self, max_bytes_per_second: float, budgets: Collection[RateBudget], *, peer_name: str) -> None:
        self._limit, self._budgets = max_bytes_per_second, budgets
        self._shares: list[float] = []  # of the budgets; 0: none
        self._told = 0.0  # by the peer, of what all that send to it share; 0: nothing
        self._peer_name = peer_name
        self._pace = self._limit  # of all connections together; 0: none is told, infinity: none any more
        self._chunks: ChunkSize | None = None  # what there is to log of how large they are
        self._logged_chunk_bytes = 0

    def divide(self, lines: Collection[ConnectionWorker]) -> None:
        """Have the kernel send an equal part over each of the link's connections."""
        for line in lines if self._pace else ():
            line.pace(self._pace / len(lines))

    def follow_budgets(
        self, link: Hashable, use: LinkUsage, lines: Collection[ConnectionWorker], *, now: float
    ) -> None:
        """Send no faster than the link's share of what it sends from together with others."""
        self._shares = [budget.share(link, use, now=now) for budget in self._budgets]
        self._choose(lines)

    def told(self, bytes_per_second: float, lines: Collection[ConnectionWorker]) -> None:
        """Send no faster than the peer wants; 0: it does not say."""
        self._told = bytes_per_second
        self._choose(lines)

    def _choose(self, lines: Collection[ConnectionWorker]) -> None:
        none = math.inf if self._pace else 0.0
        wanted = min(filter(None, (self._limit, self._told, *self._shares)), default=none)
        if not math.isclose(wanted, self._pace, rel_tol=PACE_STEP_RATIO):
            self._pace = wanted
            self.divide(lines)

    def fit_chunks(self, outbox: Outbox, *, achievable_bytes_per_second: float, num_connections: int) -> None:
        """Have chunks no larger than what a connection carries in a while, as far as that is known."""
        known = min(achievable_bytes_per_second or math.inf, self._pace or math.inf)
        size = outbox.set_rate(known / max(1, num_connections))
        self._chunks = size if num_connections and (known < math.inf or not self._logged_chunk_bytes) else None

    def log_chunks(self) -> None:
        """Once it is known how large they are, and where that has changed much."""
        size, logged = self._chunks, self._logged_chunk_bytes
        if size is not None and not logged / MUCH < size.num_bytes < MUCH * logged:
            _log.info("link.chunks", peer=self._peer_name, bytes=size.num_bytes, reason=size.reason)
            self._logged_chunk_bytes = size.num_bytes

    def leave_budgets(self, link: Hashable) -> None:
        """The link is closed, and asks for no share any more."""
        for budget in self._budgets:
            budget.forget(link)
