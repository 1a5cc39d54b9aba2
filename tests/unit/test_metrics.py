"""Metrics: named by the rules, and served over HTTP."""

from __future__ import annotations

import re
import urllib.request

import pytest

from prfaas import metrics


def test_every_name_has_prefix_component_and_base_unit() -> None:
    for item in metrics.CATALOGUE:
        assert re.fullmatch(r"prfaas_(agent|router|sidecar|manager|connector|colocate)(_[a-z0-9]+)+", item.name), (
            item.name
        )
        assert item.name.endswith("_total") == (item.kind == "counter"), item.name
        assert not re.search(r"_(ms|milliseconds|kb|mb|gb|bits)(_|$)", item.name), item.name
        assert "request_id" not in item.labels


def test_a_metric_is_counted_and_served() -> None:
    metrics.GRANTS_REFUSED.labels(reason="expired").inc()
    server = metrics.serve("127.0.0.1:0")
    try:
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=60) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    assert re.search(r'prfaas_agent_grants_refused_total\{reason="expired"\} [1-9]', text)
    for item in metrics.CATALOGUE:
        assert f"# TYPE {item.name} {item.kind}" in text


def test_a_closed_server_frees_its_port() -> None:
    first = metrics.serve("127.0.0.1:0")
    first.close()
    metrics.serve(first.address).close()


def test_a_taken_port_is_an_os_error() -> None:
    server = metrics.serve("127.0.0.1:0")
    try:
        with pytest.raises(OSError, match="in use"):
            metrics.serve(server.address)
    finally:
        server.close()
