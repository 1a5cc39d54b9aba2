"""An OTLP collector on loopback: takes spans over HTTP as any other does, and keeps them by trace."""

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
    """What has been taken until now."""

    def __init__(self) -> None:
        self._spans: list[TakenSpan] = []
        self._lock = threading.Lock()
        self.endpoint = ""

    def take(self, body: bytes) -> None:
        """Take OTLP's JSON. Raises KeyError and ValueError where it is none."""
        spans = list(_spans(json.loads(body)))
        with self._lock:
            self._spans += spans

    def trace(self, trace_id: str) -> list[TakenSpan]:
        """The spans of one trace, oldest first."""
        with self._lock:
            return sorted((span for span in self._spans if span.trace == trace_id), key=lambda its: its.start_ns)

    @property
    def traces(self) -> set[str]:
        with self._lock:
            return {span.trace for span in self._spans}


def _spans(request: dict[str, Any]) -> Iterator[TakenSpan]:
    for resource in request["resourceSpans"]:
        about = _values(resource["resource"]["attributes"])
        for its in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
            assert (len(its["traceId"]), len(its["spanId"]), len(its["parentSpanId"]) % 16) == (32, 16, 0)
            yield TakenSpan(
                its["name"],
                its["traceId"],
                its["spanId"],
                its["parentSpanId"],
                about["service.name"],
                about["service.instance.id"],
                _values(its["attributes"]),
                tuple(event["name"] for event in its["events"]),
                its["status"].get("code", 0) == FAILED,
                int(its["startTimeUnixNano"]),
                int(its["endTimeUnixNano"]),
            )


def _values(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    """One value each, as its kind is read: 64-bit integers stand as text."""
    found = {}
    for attribute in attributes:
        ((kind, value),) = attribute["value"].items()
        found[attribute["key"]] = READ[kind](value)
    return found


@contextmanager
def running_collector() -> Iterator[Collector]:
    """Listens until the block ends; `endpoint` is what `traces_endpoint` names."""
    collector = Collector()

    class Taking(BaseHTTPRequestHandler):
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

    server = ThreadingHTTPServer(("127.0.0.1", 0), Taking)
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
