"""Gauges of links, and the server of an agent's pages."""

import socket
import struct
import threading
import urllib.request
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from prfaas.agent.status import LINK_REFRESH_SECONDS, LinkMetrics, StatusServer
from prfaas.transport.sender.stats import LinkStats
from tests.support.waiting import wait_until

BLANK = LinkStats(**dict.fromkeys(LinkStats.__dataclass_fields__, 0) | {"congestion": None})  # type: ignore[arg-type]
CONGESTED = replace(
    BLANK,
    peer="tokyo-1",
    num_connections=8,
    rtt_seconds=0.09,
    min_rtt_seconds=0.03,
    achievable_bytes_per_second=1e8,
    queue_seconds=0.7,
    queued_bytes=70_000_000,
    unsent_bytes=100_000,
    unacknowledged_bytes=5_000_000,
    congestion="queue",
    utilization_ratio=0.9,
    resent_ratio=0.01,
)


def _sample(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"prfaas_agent_{name}", labels)


def test_link_gauges_show_congestion_and_queues() -> None:
    LinkMetrics(lambda: [CONGESTED]).refresh(0.0)
    at = {"peer": "tokyo-1"}
    assert {reason: _sample("link_congested", reason=reason, **at) for reason in ("queue", "loss", "rtt")} == {
        "queue": 1,
        "loss": 0,
        "rtt": 0,
    }
    assert _sample("link_queued_bytes", **at) == 70_000_000
    assert _sample("link_rtt_seconds", **at) == 0.09
    assert _sample("link_retransmit_ratio", **at) == 0.01
    assert _sample("link_achievable_bytes_per_second", **at) == 1e8


def test_gauges_of_a_closed_link_are_removed() -> None:
    states = [CONGESTED, replace(CONGESTED, peer="osaka-1")]
    gauges = LinkMetrics(lambda: states)
    gauges.refresh(0.0)
    states.pop()
    gauges.refresh(LINK_REFRESH_SECONDS / 2)
    assert _sample("link_rtt_seconds", peer="osaka-1") == 0.09, "no refresh is due"
    gauges.refresh(LINK_REFRESH_SECONDS)
    assert _sample("link_rtt_seconds", peer="osaka-1") is None
    assert _sample("link_congested", peer="osaka-1", reason="queue") is None
    assert _sample("link_rtt_seconds", peer="tokyo-1") == 0.09


def test_link_in_use_wins_for_a_moved_peer() -> None:
    LinkMetrics(lambda: [CONGESTED, replace(BLANK, peer="tokyo-1")]).refresh(0.0)
    assert _sample("link_rtt_seconds", peer="tokyo-1") == 0.09


def test_half_a_request_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    server = StatusServer("127.0.0.1:0", {"/status": dict})
    server.start()
    host, _, port = server.address.rpartition(":")
    for _ in range(10):
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"GET /status HT")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # Ends with a reset.
    with urllib.request.urlopen(f"http://{server.address}/status") as response:
        assert response.read() == b"{}"
    wait_until(lambda: not any("process_request" in thread.name for thread in threading.enumerate()), what="the ends")
    server.close()
    assert "Traceback" not in capfd.readouterr().err
