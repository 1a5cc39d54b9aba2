"""OTLP collector on loopback that keeps spans by trace."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.waiting import POLL_SECONDS

READ: dict[str, Callable[[Any], Any]] = {"stringValue": str, "intValue": int, "doubleValue": float, "boolValue": bool}
FAILED = 2  # OTLP's STATUS_CODE_ERROR


@dataclass(frozen=True)
class TakenSpan:
    """One span; ids are hex, `parent` is empty for a root."""

    name: str
    trace: str
    span: str
    parent: str
    service: str
    instance: str
    attributes: dict[str, Any]
    events: tuple[str, ...]
    is_failed: bool
    start_ns: int
    end_ns: int


class Collector:
    """Spans received so far."""

    def __init__(self) -> None:
        self._spans: list[TakenSpan] = []
        self._lock = threading.Lock()
        self.endpoint = ""

    def take(self, body: bytes) -> None:
        """Add the spans of an OTLP request in JSON; raise KeyError or ValueError for other content."""
        spans = list(_spans(json.loads(body)))
        with self._lock:
            self._spans += spans

    def trace(self, trace_id: str) -> list[TakenSpan]:
        """Return the spans of one trace, oldest first."""
        with self._lock:
            return sorted((span for span in self._spans if span.trace == trace_id), key=lambda span: span.start_ns)

    @property
    def traces(self) -> set[str]:
        with self._lock:
            return {span.trace for span in self._spans}


def _spans(request: dict[str, Any]) -> Iterator[TakenSpan]:
    for resource in request["resourceSpans"]:
        about = _values(resource["resource"]["attributes"])
        for record in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
            assert (len(record["traceId"]), len(record["spanId"]), len(record["parentSpanId"]) % 16) == (32, 16, 0)
            yield TakenSpan(
                record["name"],
                record["traceId"],
                record["spanId"],
                record["parentSpanId"],
                about["service.name"],
                about["service.instance.id"],
                _values(record["attributes"]),
                tuple(event["name"] for event in record["events"]),
                record["status"].get("code", 0) == FAILED,
                int(record["startTimeUnixNano"]),
                int(record["endTimeUnixNano"]),
            )


def _values(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the attributes as Python values; OTLP writes 64-bit integers as text."""
    found = {}
    for attribute in attributes:
        ((kind, value),) = attribute["value"].items()
        found[attribute["key"]] = READ[kind](value)
    return found


@contextmanager
def running_collector() -> Iterator[Collector]:
    """Run a collector until the block ends; `traces_endpoint` takes its `endpoint`."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            is_ours = self.path == "/v1/traces" and self.headers["Content-Type"] == "application/json"
            if is_ours:
                collector.take(body)
            self.send_response(200 if is_ours else 415)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,))
    thread.start()
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
