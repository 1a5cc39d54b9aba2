"""One request through router, manager and both agents as processes: its trace and its TTFT phases."""

import json
import secrets
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.process_deployment import MODEL, ProcessDeployment, fresh_prompt, running_deployment
from tests.support.waiting import until
from tools.demo.client import get_text

T = 256
PHASES = "prfaas_manager_ttft_phase_seconds_total"
CLIENT_SPAN = "b7ad6b7169203331"
ENVIRONMENT = {
    # Milliseconds until a batch is sent.
    "OTEL_BSP_SCHEDULE_DELAY": "100",
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


class Collector(BaseHTTPRequestHandler):
    """OTLP collector, which keeps the spans of all processes with the names of their services."""

    spans: list[dict[str, Any]]

    def do_POST(self) -> None:
        assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/json")
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in request["resourceSpans"]:
            about = _values(resource["resource"]["attributes"])
            for scope in resource["scopeSpans"]:
                self.spans.extend(span | {"about": about} for span in scope["spans"])
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def _values(attributes: list[dict[str, Any]]) -> dict[str, str]:
    """Return the attributes whose values are texts."""
    return {item["key"]: item["value"]["stringValue"] for item in attributes if "stringValue" in item["value"]}


@pytest.fixture(scope="module")
def spans() -> Iterator[list[dict[str, Any]]]:
    """Run a collector for all components, and return its growing list of spans."""
    Collector.spans = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server, pytest.MonkeyPatch.context() as environment:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        for component in ("ROUTER", "MANAGER", "AGENT"):
            endpoint = f"http://127.0.0.1:{server.server_port}"
            environment.setenv(f"PRFAAS_{component}_TRACES_ENDPOINT", endpoint)
        for name, value in ENVIRONMENT.items():
            environment.setenv(name, value)
        yield Collector.spans
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, spans: list[dict[str, Any]]) -> Iterator[ProcessDeployment]:
    with running_deployment(tmp_path_factory.mktemp("site"), num_engines=1, threshold_tokens=T) as made:
        yield made


async def _ask(site: ProcessDeployment, *, flags: str) -> str:
    """Send a traced request and return the client's trace id."""
    trace = secrets.token_hex(16)
    body = {"model": MODEL, "prompt": fresh_prompt(2 * T), "max_tokens": 4}
    headers = {"traceparent": f"00-{trace}-{CLIENT_SPAN}-{flags}", "x-request-id": f"traced-{flags}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{site.router_url}/v1/completions", json=body, headers=headers) as response,
    ):
        assert response.status == 200
        assert response.headers["x-prfaas-route"] == "remote"
    return trace


def _with_parents(spans: list[dict[str, Any]]) -> set[tuple[str, str, str | None]]:
    names = {span["spanId"]: span["name"] for span in spans}
    return {(span["name"], span["about"]["service.name"], names.get(span["parentSpanId"])) for span in spans}


async def test_one_trace_has_the_nested_spans_of_all_processes(
    site: ProcessDeployment, spans: list[dict[str, Any]]
) -> None:
    before = {span["traceId"] for span in spans}
    # This client asks for no trace.
    await _ask(site, flags="00")
    trace = await _ask(site, flags="01")
    await until(lambda: len(spans) >= len(WANTED), what="the spans")
    found = [span for span in spans if span["traceId"] == trace]
    assert _with_parents(found) == WANTED
    assert {span["traceId"] for span in spans} - before == {trace}, "heartbeats and other calls begin no traces"
    by_name = {span["name"]: span for span in found}
    request, send, deliver = by_name["router.request"], by_name["agent.send"], by_name["agent.deliver"]
    assert request["parentSpanId"] == CLIENT_SPAN
    attributes = _values(request["attributes"])
    assert (attributes["prfaas.request_id"], attributes["prfaas.reason"]) == ("traced-01", "long")
    of_agents = [by_name[f"agent.{step}"] for step in ("send", "receive", "deliver")]
    assert [span["about"]["service.instance.id"] for span in of_agents] == ["east", "west", "west"]
    assert len({_values(span["attributes"])["prfaas.transfer_id"] for span in of_agents}) == 1
    assert [event["name"] for event in send["events"]] == ["accepted", "forward_ended"]
    assert [event["name"] for event in deliver["events"]] == ["ready"]
    assert not any(span["status"] for span in found)


def _phase_values(site: ProcessDeployment, name: str) -> dict[str, float]:
    """Return the manager's metric for remote requests by phase; "" is the key of a metric without phases."""
    text = get_text(f"{site.manager_url}/metrics")
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples if sample.name == name
    ]
    return {sample.labels.get("phase", ""): sample.value for sample in samples if sample.labels["route"] == "remote"}


async def test_ttft_is_divided_into_phases(site: ProcessDeployment) -> None:
    await _ask(site, flags="00")
    await until(lambda: _phase_values(site, PHASES).get("load"), what="the phases at the manager")
    await until(lambda: _is_divided(site), what="phases that sum up to the time to the first token")
    phases = _phase_values(site, PHASES)
    assert set(phases) >= {"decide", "queue", "prefill", "wire", "load", "rest"}
    assert phases["queue"] > 0 and phases["prefill"] > 0, "the engine paces its layers"


def _is_divided(site: ProcessDeployment) -> bool:
    whole = _phase_values(site, "prfaas_manager_ttft_seconds_sum").get("", 0.0)
    return sum(_phase_values(site, PHASES).values()) == pytest.approx(whole)
