"""What a link's connections add up to, from made figures of the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from prfaas.transport.codec.packing import PackFormat
from prfaas.transport.congestion.rate_estimator import CongestionReason
from prfaas.transport.net.connection import TcpHistory
from prfaas.transport.net.sockets import TcpInfo
from prfaas.transport.sender.connection_worker import ConnectionWorker
from prfaas.transport.sender.outbox import Outbox
from prfaas.transport.sender.stats import LinkMonitor, LinkStats

SEGMENT_BYTES = 1448
NOTHING = TcpInfo(0.03, 0.03, 0, 0, SEGMENT_BYTES, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)


@dataclass(eq=False)
class Figures:
    """Of one connection."""

    info: TcpInfo
    in_flight_bytes: int = 0
    seen: TcpInfo | None = None
    casts: bool = False
    recent: TcpHistory = field(default_factory=lambda: TcpHistory(0.0))

    def tcp_info(self) -> TcpInfo:
        return self.info

    def search_rate(self) -> None:
        """What a gauge may ask for."""

    def deliver(self, num_segments: int, *, rtt_seconds: float) -> None:
        num_bytes = num_segments * SEGMENT_BYTES
        self.info = replace(
            self.info,
            rtt_seconds=rtt_seconds,
            heard_segments=self.info.heard_segments + num_segments // 2,
            delivered_segments=self.info.delivered_segments + num_segments,
            bytes_sent=self.info.bytes_sent + num_bytes,
        )
        self.in_flight_bytes = num_bytes


class Watch:
    """A gauge that takes a sample every twentieth of a second."""

    def __init__(self, lines: Sequence[Figures]) -> None:
        self.gauge = LinkMonitor()
        self._lines, self._outbox = lines, Outbox(lambda event: None, num_connections=len(lines))
        self._at = 0.0

    def state(self) -> LinkStats:
        return self.gauge.state(
            cast(list[ConnectionWorker], self._lines), self._outbox, peer="far", address="127.0.0.1:1", is_down=False
        )

    def congestion(self) -> CongestionReason | None:
        self._at += 0.05
        self.gauge.measure(self._at, cast(list[ConnectionWorker], self._lines), self._outbox)
        return self.gauge.health.congestion


def test_what_a_burst_left_on_idle_connections_does_not_choke_a_link_that_is_used_over_another() -> None:
    full, used = Figures(NOTHING), Figures(NOTHING)
    watch = Watch([full, used])
    watch.congestion()
    full.deliver(1000, rtt_seconds=0.15)
    assert watch.congestion() == "rtt"
    full.in_flight_bytes = 0
    found = []
    for _ in range(40):
        used.deliver(45, rtt_seconds=0.031)
        found.append(watch.congestion())
    assert set(found) == {None}


def test_a_connection_that_is_used_again_says_nothing_of_its_burst_before_it_has_measured_anew() -> None:
    line = Figures(NOTHING)
    watch = Watch([line])
    line.deliver(1000, rtt_seconds=0.15)
    watch.congestion()
    line.in_flight_bytes = 0
    watch.congestion()
    line.in_flight_bytes = 64 << 10
    assert watch.congestion() is None
    line.deliver(45, rtt_seconds=0.15)
    assert watch.congestion() == "rtt", "as it has measured anew"


def test_connections_over_unlike_ways_do_not_choke_a_link() -> None:
    ways = [Figures(NOTHING), Figures(replace(NOTHING, rtt_seconds=0.08, min_rtt_seconds=0.08))]
    watch = Watch(ways)
    for _ in range(10):
        for way in ways:
            way.deliver(100, rtt_seconds=way.info.rtt_seconds)
        assert watch.congestion() is None


def test_what_waits_at_the_peer_behind_lost_segments_counts_in_the_most_that_a_link_may_carry() -> None:
    piece_bytes = 1_000_000
    watch = Watch([Figures(replace(NOTHING, out_of_order_bytes=6 * piece_bytes))])
    for _ in range(8):
        watch.gauge.bounds.handed(piece_bytes, now=-0.98)
    watch.congestion()
    late_seconds = 0.05 + 0.98 - NOTHING.rtt_seconds
    assert watch.gauge.health.achievable_bytes_per_second == pytest.approx(7 * piece_bytes / late_seconds)


def test_what_is_said_of_a_link_is_added_up_over_its_connections() -> None:
    one = Figures(replace(NOTHING, unsent_bytes=1, delivery_bytes_per_second=100, max_pacing_bytes_per_second=1000))
    other = Figures(replace(NOTHING, unsent_bytes=2, delivery_bytes_per_second=200, max_pacing_bytes_per_second=2000))
    watch = Watch([one, other])
    one.in_flight_bytes, other.in_flight_bytes = 10, 20
    state = watch.state()
    assert (state.peer, state.address, state.num_connections, state.is_down) == ("far", "127.0.0.1:1", 2, False)
    assert (state.unsent_bytes, state.unacknowledged_bytes) == (3, 30)
    assert (state.delivery_bytes_per_second, state.pacing_bytes_per_second) == (300, 3000)
    assert (state.segment_bytes, state.lossy_fp8, state.packing) == (SEGMENT_BYTES, False, "")
    other.casts = True
    watch.gauge.packing.way = PackFormat("zstd", 2)
    assert (watch.state().lossy_fp8, watch.state().packing) == (True, "zstd/2")
