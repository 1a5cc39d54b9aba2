"""Spans in OTLP's JSON, and a collector that is not there."""

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Status, StatusCode

from prfaas.otlp import JsonExporter, export_request
from tools.free_ports import free_address


def _two_spans() -> InMemorySpanExporter:
    kept, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("test")
    attributes: dict[str, str | int | float | bool] = {"n": 5, "x": 0.5, "yes": True, "text": "é"}
    with tracer.start_as_current_span("outer", attributes=attributes), tracer.start_as_current_span("inner") as inner:
        inner.add_event("moment")
        inner.set_status(Status(StatusCode.ERROR, "late"))
    return kept


def test_a_batch_is_what_otlp_calls_an_export_request() -> None:
    inner, outer = export_request(_two_spans().get_finished_spans())["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert outer["attributes"] == [
        {"key": "n", "value": {"intValue": "5"}},
        {"key": "x", "value": {"doubleValue": 0.5}},
        {"key": "yes", "value": {"boolValue": True}},
        {"key": "text", "value": {"stringValue": "é"}},
    ]
    assert (outer["parentSpanId"], outer["status"], outer["kind"]) == ("", {}, 1)
    assert (inner["traceId"], inner["parentSpanId"]) == (outer["traceId"], outer["spanId"])
    assert inner["status"] == {"code": 2, "message": "late"}
    assert [event["name"] for event in inner["events"]] == ["moment"]
    assert int(outer["startTimeUnixNano"]) <= int(inner["startTimeUnixNano"]) <= int(inner["endTimeUnixNano"])
    assert len(outer["traceId"]) == 32 and len(outer["spanId"]) == 16


def test_a_collector_that_is_not_there_costs_the_batch_and_nothing_else() -> None:
    exporter = JsonExporter(f"http://{free_address()}/v1/traces")
    assert exporter.export(_two_spans().get_finished_spans()) is SpanExportResult.FAILURE
