"""Figures of a link: the kernel's figures of each connection, summed up and fed to the estimators."""

import math
import operator
import os
from collections.abc import Collection
from dataclasses import dataclass, replace

from prfaas.transport.codec.packing import LinkLoad, PackingPolicy
from prfaas.transport.congestion.connection_policy import LinkThroughput, QueueDrain, RateSearch
from prfaas.transport.congestion.rate_budget import LinkUsage
from prfaas.transport.congestion.rate_estimator import (
    LinkHealth,
    LinkSample,
    RateBounds,
    RateEstimator,
    RoundTrip,
    RoundTripTracker,
)
from prfaas.transport.net.sockets import Growth, TcpInfo
from prfaas.transport.sender.connection_worker import ConnectionWorker
from prfaas.transport.sender.outbox import Outbox


@dataclass(frozen=True, kw_only=True)
class LinkStats(LinkHealth):
    """Figures of a link at one moment. Rates are in bytes of payload.

    Byte counts are totals over all connections that the link ever had.
    """

    peer: str
    address: str
    num_connections: int
    is_down: bool  # There is no connection, and the last attempt to dial failed.
    num_transfers: int
    queued_bytes: int  # Ready, but not yet assigned to a connection.
    unacknowledged_bytes: int  # Assigned to a connection, but not acknowledged.
    unsent_bytes: int  # Part of the unacknowledged bytes that is still in send buffers.
    acknowledged_bytes: int
    rtt_seconds: float  # Of the busy connection on which it has risen most, else the minimum.
    min_rtt_seconds: float  # Minimum on the same connection.
    sent_bytes: int  # Sent by the kernel, without headers.
    retransmitted_bytes: int
    segment_bytes: int  # Largest segment of any connection.
    packing: str  # Present pack format such as "zstd/2" (codec, bytes per element), or "".
    saved_bytes: int  # Saved by packing.
    pacing_bytes_per_second: int  # Sum of the kernel's rate limits, including headers.


class LinkMonitor:
    """Samples a link's connections for its estimators. `Link` holds its lock around every call."""

    def __init__(self) -> None:
        self.packing = PackingPolicy(num_processors=len(os.sched_getaffinity(0)))
        self.bounds = RateBounds()
        self.min_rtt_seconds = 0.0  # Minimum over all connections at the last sample.
        self._growth = Growth()  # Totals over all connections.
        self._round_trips: RoundTripTracker[ConnectionWorker] = RoundTripTracker()
        self._estimator = RateEstimator()
        self._rate_search, self._num_searches = RateSearch(), 0
        self._queue_drain = QueueDrain()
        self.drain_limit = math.inf  # Bytes per second that may leave while the queue on the path drains.

    @property
    def health(self) -> LinkHealth:
        """Health of the link, with rates in bytes of payload."""
        health, ratio = self._estimator.health, self.packing.packed_ratio
        return replace(health, achievable_bytes_per_second=health.achievable_bytes_per_second / ratio)

    def usage(self, *, is_busy: bool) -> LinkUsage:
        """Return what the link uses of its rate budgets."""
        return LinkUsage(is_busy, self._estimator.is_saturated, self._growth.delivered_bytes)

    def measure(self, now: float, workers: Collection[ConnectionWorker], outbox: Outbox) -> LinkThroughput | None:
        """Sample every connection. Returns the link's throughput while it is full and steady."""
        infos = [(worker, info) for worker in workers if (info := worker.connection.tcp_info()) is not None]
        self._count(infos)
        sample = self._sample(now, infos, outbox)
        self._estimator.add(sample)
        if infos and self._rate_search.is_due(sample, num_connections=len(infos)):
            # The connections take turns.
            self._num_searches += 1
            infos[self._num_searches % len(infos)][0].connection.search_rate()
        rate = self._estimator.health.achievable_bytes_per_second
        is_shared = outbox.num_transfers > 1
        self.drain_limit = self._queue_drain.limit(sample, bytes_per_second=rate, is_shared=is_shared)
        is_full = outbox.queued_bytes > 0
        self.packing.observe(LinkLoad(now, rate, len(infos), is_full, outbox.acknowledged_bytes))
        if not self._estimator.is_steady:
            return None
        health = self._estimator.health
        return LinkThroughput(len(infos), health.achievable_bytes_per_second, health.resent_ratio)

    def _count(self, infos: list[tuple[ConnectionWorker, TcpInfo]]) -> None:
        heard: dict[ConnectionWorker, int] = {}
        for worker, info in infos:
            self._growth = Growth(*map(operator.add, self._growth, info.grown_since(worker.seen)))
            heard[worker] = info.received_since(worker.seen)
            worker.seen = info
        self._round_trips.observe(heard, in_flight=[worker for worker, _ in infos if worker.in_flight_bytes])

    def _round_trip(self, infos: list[tuple[ConnectionWorker, TcpInfo]]) -> RoundTrip:
        trips = {worker: RoundTrip(info.rtt_seconds, info.min_rtt_seconds) for worker, info in infos}
        return self._round_trips.highest(trips)

    def _sample(self, now: float, infos: list[tuple[ConnectionWorker, TcpInfo]], outbox: Outbox) -> LinkSample:
        # The estimators work in bytes on the wire, the bounds in bytes of payload.
        ratio = self.packing.packed_ratio
        rtt = self.min_rtt_seconds = min((info.min_rtt_seconds for _, info in infos), default=0.0)
        most = self.bounds.most(
            rtt_seconds=rtt,
            num_connections=max(1, len(infos)),
            now=now,
            out_of_order_bytes=int(sum(info.out_of_order_bytes for _, info in infos) / ratio),
        )
        round_trip = self._round_trip(infos)
        return LinkSample(
            now,
            delivered_bytes=self._growth.delivered_bytes,
            sent_bytes=self._growth.sent_bytes,
            retransmitted_bytes=self._growth.retransmitted_bytes,
            queued_bytes=int(ratio * outbox.queued_bytes),
            unacknowledged_bytes=int(ratio * sum(worker.in_flight_bytes for worker, _ in infos)),
            rtt_seconds=round_trip.seconds,
            min_rtt_seconds=round_trip.min_seconds,
            least_bytes_per_second=ratio * self.bounds.take_lower_bound(),
            most_bytes_per_second=ratio * most,
            segment_bytes=max((info.segment_bytes for _, info in infos), default=0),
        )

    def stats(
        self, workers: Collection[ConnectionWorker], outbox: Outbox, *, peer: str, address: str, is_down: bool
    ) -> LinkStats:
        """Return the link's figures. Costs a few microseconds per connection."""
        known = [(worker, info) for worker in workers if (info := worker.connection.tcp_info()) is not None]
        infos, round_trip = [info for _, info in known], self._round_trip(known)
        return LinkStats(
            peer=peer,
            address=address,
            num_connections=len(workers),
            is_down=is_down,
            num_transfers=outbox.num_transfers,
            queued_bytes=outbox.queued_bytes,
            unacknowledged_bytes=sum(worker.in_flight_bytes for worker in workers),
            unsent_bytes=sum(info.unsent_bytes for info in infos),
            acknowledged_bytes=outbox.acknowledged_bytes,
            rtt_seconds=round_trip.seconds,
            min_rtt_seconds=round_trip.min_seconds,
            sent_bytes=self._growth.sent_bytes,
            retransmitted_bytes=self._growth.retransmitted_bytes,
            segment_bytes=max((info.segment_bytes for info in infos), default=0),
            **vars(self.health),
            packing=f"{pack_format.codec}/{pack_format.width}" if (pack_format := self.packing.format) else "",
            saved_bytes=self.packing.saved_bytes,
            pacing_bytes_per_second=sum(info.max_pacing_bytes_per_second for info in infos),
        )
