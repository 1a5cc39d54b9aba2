"""Report of a measurement, and its advice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas.bench.link import TransferRun
from prfaas.bench.report import Host, Measurement, recommendations, to_json
from prfaas.transport.sender.stats import LinkStats

LINK = LinkStats(**dict.fromkeys(LinkStats.__dataclass_fields__, 0) | {"min_rtt_seconds": 0.03, "num_connections": 8})  # type: ignore[arg-type]
RUN = TransferRun(
    num_bytes=10**9,
    seconds=2.0,
    first_seconds=0.02,
    exposed_seconds=0.05,
    cpu_seconds=0.4,
    checksum_failures=0,
    link=LINK,
)
FOUND = Measurement(replace(RUN, seconds=4.0), [RUN, replace(RUN, seconds=1.0), replace(RUN, seconds=2.5)])
GOOD_HOST = Host(8 << 20, has_bbr=True)


def test_a_good_link_needs_no_advice() -> None:
    assert recommendations(FOUND, GOOD_HOST) == []


@pytest.mark.parametrize(
    ("host", "word"), [(Host(8 << 20, has_bbr=False), "tcp_bbr"), (Host(1 << 18, has_bbr=True), "net.core.wmem_max")]
)
def test_a_host_that_holds_a_long_link_back_is_named(host: Host, word: str) -> None:
    assert len(recommendations(FOUND, host)) == 1 and word in recommendations(FOUND, host)[0]
    short = replace(RUN, link=replace(LINK, min_rtt_seconds=0.001))
    assert recommendations(Measurement(short, [short]), host) == []


def test_an_overflowing_queue_asks_for_a_limit_below_what_was_reached() -> None:
    lossy = replace(RUN, link=replace(LINK, sent_bytes=100, retransmitted_bytes=10))
    advice = recommendations(Measurement(lossy, [lossy]), GOOD_HOST)
    assert len(advice) == 1 and "egress" in advice[0] and "3.80Gbps" in advice[0]


def test_figures_are_medians_with_their_ends() -> None:
    found = to_json(replace(FOUND, link_bytes_per_second=1e9), GOOD_HOST)
    assert found["bytes_per_second"] == {"median": 5e8, "min": 4e8, "max": 1e9}
    assert (found["cold_bytes_per_second"], found["link_ratio"]) == (2.5e8, 0.5)
    assert found["sender_cpu_seconds_per_gb"]["median"] == pytest.approx(0.4)
    assert not {"exposed_seconds", "prefill_seconds"} & set(found)
