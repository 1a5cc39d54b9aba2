"""Export of OpenTelemetry spans to a collector as OTLP JSON over HTTP (extra `tracing`).

The SDK's own exporters use protobuf messages. Envoy's package xds-protos (extra `gateway`) overwrites those messages
under the same names. OTLP JSON needs none.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

import prfaas
from prfaas import logs
from prfaas.tracing import Attribute, Kind, Span

EXPORT_SECONDS = 2.0  # A slower collector loses the batch. The end of the process waits no longer than this.
SPANS_PATH = "/v1/traces"
_ERROR_NUMBER = 2  # Of OTLP's enumeration Status.StatusCode.
_log = logs.get("tracing")


class OtlpSpan(Span):
    """Span backed by the OpenTelemetry SDK."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def note(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_named(attributes))

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def end(self, failure: str = "") -> None:
        if failure:
            self._span.set_status(Status(StatusCode.ERROR, failure))
        self._span.end()


class OtlpTracer:
    """Tracer that sends batches from a thread of the SDK, and the rest at the end of the process.

    The SDK's environment variables apply: OTEL_TRACES_SAMPLER, OTEL_BSP_SCHEDULE_DELAY, OTEL_RESOURCE_ATTRIBUTES.
    """

    def __init__(self, component: str, endpoint: str, *, instance: str) -> None:
        """Create a tracer for `endpoint`, such as http://host:4318 without a path."""
        names = {
            "service.name": f"prfaas-{component}",
            "service.instance.id": instance,
            "service.version": prfaas.__version__,
        }
        provider = TracerProvider(resource=Resource.create(names))
        provider.add_span_processor(BatchSpanProcessor(JsonExporter(f"{endpoint.rstrip('/')}{SPANS_PATH}")))
        self._tracer = provider.get_tracer("prfaas", prfaas.__version__)

    def begin(
        self, name: str, *, kind: Kind, parent: str, is_remote: bool, attributes: Mapping[str, Attribute]
    ) -> OtlpSpan:
        context = trace.set_span_in_context(NonRecordingSpan(_context(parent, is_remote=is_remote))) if parent else None
        given = _named(attributes)
        return OtlpSpan(self._tracer.start_span(name, context=context, kind=SpanKind[kind.upper()], attributes=given))


class JsonExporter(SpanExporter):
    """Exporter that posts each batch once. Failed batches are lost and logged."""

    def __init__(self, url: str) -> None:
        self._url = url

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        body = json.dumps(export_request(spans)).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=EXPORT_SECONDS):
                return SpanExportResult.SUCCESS
        except (OSError, urllib.error.URLError) as error:
            _log.warning("tracing.export_failed", url=self._url, num_spans=len(spans), error=str(error))
            return SpanExportResult.FAILURE


def export_request(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """Return the OTLP ExportTraceServiceRequest in JSON form for spans of one process."""
    scope = {"name": "prfaas", "version": prfaas.__version__}
    resource = {"attributes": _pairs(spans[0].resource.attributes)} if spans else {}
    scopes = [{"scope": scope, "spans": list(map(_span, spans))}]
    return {"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]}


def _span(span: ReadableSpan) -> dict[str, Any]:
    """Return a span as OTLP JSON: ids are hex, 64-bit integers are text."""
    context, status = span.context, span.status
    assert context is not None, "every SDK span has a context"
    failed = {"code": _ERROR_NUMBER, "message": status.description or ""} if not status.is_ok else {}
    return {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "parentSpanId": f"{span.parent.span_id:016x}" if span.parent else "",
        "name": span.name,
        "kind": span.kind.value + 1,  # OTLP's enumeration begins with UNSPECIFIED.
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _pairs(span.attributes or {}),
        "events": [{"timeUnixNano": str(event.timestamp), "name": event.name} for event in span.events],
        "status": failed,
    }


def _pairs(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": dict([_value(value)])} for key, value in attributes.items()]


def _value(value: Any) -> tuple[str, Any]:
    if isinstance(value, bool):
        return "boolValue", value
    if isinstance(value, int):
        return "intValue", str(value)
    return ("doubleValue", value) if isinstance(value, float) else ("stringValue", str(value))


def _context(traceparent: str, *, is_remote: bool) -> SpanContext:
    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, TraceFlags(int(flags, 16)))


def _named(attributes: Mapping[str, Attribute]) -> dict[str, str | int | float | bool]:
    return {f"prfaas.{name}": value for name, value in attributes.items() if value is not None}
