"""One request through router, manager and both agents, each a process of its own: the collector sees one trace of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.integration.control.site import MODEL, Site, fresh_prompt, running_site
from tests.integration.tracing.collector import Collector, TakenSpan, running_collector
from tests.waiting import until

T = 256
CLIENT_TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENVIRONMENT = {
    "OTEL_BSP_SCHEDULE_DELAY": "100",  # milliseconds until a batch is sent
    "OTEL_TRACES_SAMPLER": "parentbased_always_on",
}
# Each span with the service that makes it, and its parent.
WANTED = {
    ("router.request", "prfaas-router", None),
    ("router.tokenize", "prfaas-router", "router.request"),
    ("router.decide", "prfaas-router", "router.request"),
    ("manager.Route", "prfaas-manager", "router.decide"),
    ("router.prefill", "prfaas-router", "router.request"),
    ("router.decode", "prfaas-router", "router.request"),
    ("agent.send", "prfaas-agent", "router.prefill"),
    ("agent.receive", "prfaas-agent", "agent.send"),
    ("agent.deliver", "prfaas-agent", "router.decode"),
}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with running_collector() as made:
        for component in ("ROUTER", "MANAGER", "AGENT"):
            monkeypatch.setenv(f"PRFAAS_{component}_TRACES_ENDPOINT", made.endpoint)
        for name, value in ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def site(tmp_path: Path, collector: Collector) -> Iterator[Site]:
    with running_site(tmp_path, num_engines=1, threshold_tokens=T) as made:
        yield made


async def _ask(site: Site, *, flags: str) -> None:
    body = {"model": MODEL, "prompt": fresh_prompt(2 * T), "max_tokens": 4}
    headers = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-{flags}", "x-request-id": f"traced-{flags}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{site.router_url}/v1/completions", json=body, headers=headers) as response,
    ):
        assert response.status == 200
        assert response.headers["x-prfaas-route"] == "remote"


def _with_parents(spans: list[TakenSpan]) -> set[tuple[str, str, str | None]]:
    names = {its.span: its.name for its in spans}
    return {(its.name, its.service, names.get(its.parent)) for its in spans}


async def test_one_trace_of_a_request_has_the_spans_of_all_processes_below_each_other(
    site: Site, collector: Collector
) -> None:
    await _ask(site, flags="00")  # a client that does not want to be traced is not
    await _ask(site, flags="01")
    await until(lambda: len(collector.trace(CLIENT_TRACE)) >= len(WANTED), seconds=30, what="the spans")
    spans = collector.trace(CLIENT_TRACE)
    assert _with_parents(spans) == WANTED
    assert collector.traces == {CLIENT_TRACE}, "heartbeats and other calls begin no traces"
    by_name = {its.name: its for its in spans}
    request, send, deliver = by_name["router.request"], by_name["agent.send"], by_name["agent.deliver"]
    assert request.parent == CLIENT_SPAN
    assert request.attributes["prfaas.request_id"] == "traced-01" and request.attributes["prfaas.reason"] == "long"
    assert (send.instance, by_name["agent.receive"].instance, deliver.instance) == ("east", "west", "west")
    assert len({its.attributes["prfaas.transfer_id"] for its in spans if its.name.startswith("agent.")}) == 1
    assert send.events == ("accepted", "forward_ended") and deliver.events == ("ready",)
    assert not any(its.is_failed for its in spans)
    assert all(its.start_ns <= its.end_ns for its in spans)
