"""What a link's connections add up to, and what follows from it: which one searches a higher rate, how chunks are packed."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace

from prfaas.transport.line import Line
from prfaas.transport.link_meter import LinkHealth, LinkMeter, LinkSample
from prfaas.transport.outbox import Outbox
from prfaas.transport.packing_choice import LinkPace, PackingChoice
from prfaas.transport.rate_bounds import RateBounds
from prfaas.transport.rate_search import RateSearch
from prfaas.transport.tcp_info import TcpInfo


class LinkGauge:
    """No threads and no locks of its own: `sender.Link` holds its lock around every call."""

    def __init__(self) -> None:
        self.packing = PackingChoice(num_processors=len(os.sched_getaffinity(0)))
        self.bounds = RateBounds()
        self.min_rtt_seconds = 0.0  # at the last sample
        self.sent_bytes = 0  # by the kernel, headers left out
        self.retransmitted_bytes = 0
        self._delivered_bytes = 0
        self._meter, self._rate_search = LinkMeter(), RateSearch()
        self._num_searches = 0

    @property
    def health(self) -> LinkHealth:
        """In bytes of payload, of which the wire carries fewer where they are packed."""
        its = self._meter.health
        return replace(its, achievable_bytes_per_second=its.achievable_bytes_per_second / self.packing.packed_ratio)

    @property
    def saturated_rate(self) -> float:
        """What the wire carries at most, 0 while that is not known because nothing had to wait."""
        return self._meter.health.achievable_bytes_per_second if self._meter.is_saturated else 0.0

    @property
    def lost_bytes_per_second(self) -> float:
        """What is sent again at present."""
        return self._meter.lost_bytes_per_second

    def measure(self, now: float, lines: Collection[Line], outbox: Outbox) -> None:
        """Take a sample of every connection."""
        infos = [(line, info) for line in lines if (info := line.tcp_info()) is not None]
        for line, info in infos:
            self._count(line, info)
        sample = self._sample(now, infos, outbox)
        self._meter.add(sample)
        if infos and self._rate_search.is_due(sample, num_connections=len(infos)):
            self._num_searches += 1  # which one searches goes round
            infos[self._num_searches % len(infos)][0].search_rate()
        rate, is_full = self._meter.health.achievable_bytes_per_second, outbox.queued_bytes > 0
        self.packing.observe(LinkPace(now, rate, len(infos), is_full, outbox.acknowledged_bytes))

    def _count(self, line: Line, info: TcpInfo) -> None:
        delivered, sent, retransmitted = info.grown_since(line.seen)
        line.seen = info
        self._delivered_bytes += delivered
        self.sent_bytes += sent
        self.retransmitted_bytes += retransmitted

    def _sample(self, now: float, infos: list[tuple[Line, TcpInfo]], outbox: Outbox) -> LinkSample:
        ratio = self.packing.packed_ratio  # payload takes less of the link
        rtt = self.min_rtt_seconds = min((info.min_rtt_seconds for _, info in infos), default=0.0)
        most = self.bounds.most(rtt_seconds=rtt, num_connections=max(1, len(infos)), now=now)
        return LinkSample(
            now,
            delivered_bytes=self._delivered_bytes,
            sent_bytes=self.sent_bytes,
            retransmitted_bytes=self.retransmitted_bytes,
            queued_bytes=int(ratio * outbox.queued_bytes),
            unacknowledged_bytes=int(ratio * sum(line.in_flight_bytes for line, _ in infos)),
            rtt_seconds=max((info.rtt_seconds for _, info in infos), default=0.0),
            min_rtt_seconds=rtt,
            least_bytes_per_second=ratio * self.bounds.take_least(),
            most_bytes_per_second=ratio * most,
        )
