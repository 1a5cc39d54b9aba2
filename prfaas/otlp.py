"""Spans as OpenTelemetry's SDK makes them, sent to a collector as OTLP's JSON over HTTP (extra `tracing`).

The SDK's own exporters speak protobuf, and the messages that they import are overwritten by those that Envoy's package
(xds-protos, of the extra `gateway`) brings under the same names; OTLP's JSON needs no messages.
"""

from __future__ import annotations

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
from prfaas.tracing import Attribute, Kind

EXPORT_SECONDS = 2.0  # a collector that takes longer loses the batch; an end of the process waits no longer for it
SPANS_PATH = "/v1/traces"
_KINDS: dict[Kind, SpanKind] = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
# Numbers of OTLP's enumerations Span.SpanKind and Status.StatusCode.
_KIND_NUMBERS = {SpanKind.INTERNAL: 1, SpanKind.SERVER: 2, SpanKind.CLIENT: 3}
_ERROR_NUMBER = 2
_log = logs.get("tracing")


class OtlpSpan:
    """One span of the SDK's."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        its = self._span.get_span_context()
        return f"00-{its.trace_id:032x}-{its.span_id:016x}-{its.trace_flags:02x}"

    def note(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_named(attributes))

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def end(self, failure: str = "") -> None:
        if failure:
            self._span.set_status(Status(StatusCode.ERROR, failure))
        self._span.end()


class OtlpTracer:
    """Sends batches from a thread of the SDK's; what is left at the end of the process is sent then.

    The SDK's own variables count: OTEL_TRACES_SAMPLER, OTEL_BSP_SCHEDULE_DELAY, OTEL_RESOURCE_ATTRIBUTES.
    """

    def __init__(self, component: str, endpoint: str, *, instance: str) -> None:
        """`endpoint`: http://host:4318, without a path."""
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
        return OtlpSpan(self._tracer.start_span(name, context=context, kind=_KINDS[kind], attributes=given))


class JsonExporter(SpanExporter):
    """Posts each batch once; what the collector does not take is lost, and said so in the log."""

    def __init__(self, url: str) -> None:
        self._url = url

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        body = json.dumps(export_request(spans)).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=EXPORT_SECONDS):
                return SpanExportResult.SUCCESS
        except (OSError, urllib.error.URLError) as error:
            _log.warning("spans.not_taken", url=self._url, num_spans=len(spans), error=str(error))
            return SpanExportResult.FAILURE


def export_request(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """OTLP's ExportTraceServiceRequest in its JSON form, of spans of one process."""
    scope = {"name": "prfaas", "version": prfaas.__version__}
    resource = {"attributes": _pairs(spans[0].resource.attributes)} if spans else {}
    scopes = [{"scope": scope, "spans": list(map(_span, spans))}]
    return {"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]}


def _span(span: ReadableSpan) -> dict[str, Any]:
    """Ids are hex, 64-bit integers are text: OTLP's own rules for JSON."""
    context, status = span.context, span.status
    assert context is not None, "the SDK's spans have one"
    failed = {"code": _ERROR_NUMBER, "message": status.description or ""} if not status.is_ok else {}
    return {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "parentSpanId": f"{span.parent.span_id:016x}" if span.parent else "",
        "name": span.name,
        "kind": _KIND_NUMBERS[span.kind],
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
