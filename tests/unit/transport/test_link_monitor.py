"""Figures of a link, summed up over its connections from synthetic kernel figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import pytest

from prfaas.transport.codec.packing import PackFormat
from prfaas.transport.congestion.rate_estimator import CongestionReason
from prfaas.transport.net.sockets import TcpInfo
from prfaas.transport.sender.connection_worker import ConnectionWorker
from prfaas.transport.sender.outbox import Outbox
from prfaas.transport.sender.stats import LinkMonitor, LinkStats

SEGMENT_BYTES = 1448
NOTHING = TcpInfo(0.0, 0.03, 0.03, 0, 0, SEGMENT_BYTES, 0, 0, 0, 0, 0)


@dataclass(eq=False)
class _Worker:
    """Worker with synthetic kernel figures."""

    info: TcpInfo
    in_flight_bytes: int = 0
    seen: TcpInfo | None = None

    @property
    def connection(self) -> _Worker:
        return self

    def tcp_info(self) -> TcpInfo:
        return self.info

    def search_rate(self) -> None:
        pass

    def deliver(self, num_segments: int, *, rtt_seconds: float) -> None:
        num_bytes = num_segments * SEGMENT_BYTES
        self.info = replace(
            self.info,
            rtt_seconds=rtt_seconds,
            received_segments=self.info.received_segments + num_segments // 2,
            delivered_segments=self.info.delivered_segments + num_segments,
            bytes_sent=self.info.bytes_sent + num_bytes,
        )
        self.in_flight_bytes = num_bytes


class _Watch:
    """Monitor that takes a sample every twentieth of a second."""

    def __init__(self, workers: Sequence[_Worker]) -> None:
        self.monitor = LinkMonitor()
        self._workers = cast(list[ConnectionWorker], workers)
        self._outbox = Outbox(lambda event: None, num_connections=len(workers))
        self._now = 0.0

    def stats(self) -> LinkStats:
        return self.monitor.stats(self._workers, self._outbox, peer="far", address="127.0.0.1:1", is_down=False)

    def congestion(self) -> CongestionReason | None:
        self._now += 0.05
        self.monitor.measure(self._now, self._workers, self._outbox)
        return self.monitor.health.congestion


def test_idle_connection_that_was_full_does_not_make_the_link_congested() -> None:
    full, busy = _Worker(NOTHING), _Worker(NOTHING)
    watch = _Watch([full, busy])
    watch.congestion()
    full.deliver(1000, rtt_seconds=0.15)
    assert watch.congestion() == "rtt"
    full.in_flight_bytes = 0
    found = []
    for _ in range(40):
        busy.deliver(45, rtt_seconds=0.031)
        found.append(watch.congestion())
    assert set(found) == {None}


def test_connection_counts_again_once_it_has_measured_its_round_trip_anew() -> None:
    worker = _Worker(NOTHING)
    watch = _Watch([worker])
    worker.deliver(1000, rtt_seconds=0.15)
    watch.congestion()
    worker.in_flight_bytes = 0
    watch.congestion()
    worker.in_flight_bytes = 64 << 10
    assert watch.congestion() is None
    worker.deliver(45, rtt_seconds=0.15)
    assert watch.congestion() == "rtt"


def test_connections_over_different_paths_do_not_make_the_link_congested() -> None:
    workers = [_Worker(NOTHING), _Worker(replace(NOTHING, rtt_seconds=0.08, min_rtt_seconds=0.08))]
    watch = _Watch(workers)
    for _ in range(10):
        for worker in workers:
            worker.deliver(100, rtt_seconds=worker.info.rtt_seconds)
        assert watch.congestion() is None


def test_bytes_behind_lost_segments_raise_the_upper_bound_of_the_rate() -> None:
    chunk_bytes = 1_000_000
    watch = _Watch([_Worker(replace(NOTHING, out_of_order_bytes=6 * chunk_bytes))])
    for _ in range(8):
        watch.monitor.bounds.on_written(chunk_bytes, now=-0.98)
    watch.congestion()
    late_seconds = 0.05 + 0.98 - NOTHING.rtt_seconds
    assert watch.monitor.health.achievable_bytes_per_second == pytest.approx(7 * chunk_bytes / late_seconds)


def test_figures_are_summed_over_the_connections() -> None:
    first, second = (
        _Worker(replace(NOTHING, unsent_bytes=count, max_pacing_bytes_per_second=count)) for count in (1, 2)
    )
    watch = _Watch([first, second])
    first.in_flight_bytes, second.in_flight_bytes = 10, 20
    stats = watch.stats()
    assert (stats.peer, stats.address, stats.num_connections, stats.is_down) == ("far", "127.0.0.1:1", 2, False)
    assert (stats.unsent_bytes, stats.unacknowledged_bytes) == (3, 30)
    assert stats.pacing_bytes_per_second == 3
    assert (stats.segment_bytes, stats.packing) == (SEGMENT_BYTES, "")
    watch.monitor.packing.format = PackFormat("zstd", 2)
    assert watch.stats().packing == "zstd/2"
