"""Reports of a transfer's outcome in an engine's response."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from prfaas.transfer_report import (
    ReceivedReport,
    fallback_params,
    fallback_report,
    received_report,
    take_comment,
    to_comment,
)
from prfaas.types import TransferId

REPORT = ReceivedReport("6f" * 16, "unreachable")
EVENT = b'data: {"choices": []}\n\n'
DONE = b"data: [DONE]\n\n"


def test_report_survives_the_parameters_of_a_response() -> None:
    completed = ReceivedReport("00" * 16, "completed", 24_576)
    for report in (REPORT, completed):
        assert received_report({"remote_engine_id": "e"} | report.to_params()) == report


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"prfaas_received": "completed"},
        {"prfaas_received": {"transfer_id": "6f", "outcome": "a word of a later version", "num_tokens": 1}},
        {"prfaas_received": {"transfer_id": 5, "outcome": "completed", "num_tokens": 1}},
        {"prfaas_received": {"transfer_id": "6f", "outcome": ["completed"], "num_tokens": 1}},
    ],
)
def test_parameters_of_another_form_have_no_report(params: object) -> None:
    assert received_report(params) is None


def test_engine_reports_the_routers_reason_of_a_fallback() -> None:
    report = fallback_report(fallback_params(TransferId(b"o" * 16), "prefill_silent"))
    assert report == ReceivedReport("6f" * 16, "prefill_silent")
    assert received_report(report.to_params()) == report


@pytest.mark.parametrize(
    "fallback",
    [
        None,
        "prefill_silent",
        {"transfer_id": "6f"},
        {"transfer_id": 5, "reason": "prefill_silent"},
        {"transfer_id": "6f" * 500, "reason": "prefill_silent"},
        {"transfer_id": "6f", "reason": "no_memory"},
        {"transfer_id": "6f", "reason": ["prefill_silent"]},
    ],
)
def test_parameters_of_another_form_name_no_fallback(fallback: object) -> None:
    assert fallback_report({"prfaas_fallback": fallback}) is None


def test_comment_is_taken_out_of_a_stream() -> None:
    comment = to_comment(REPORT.to_params()).encode()
    for before, after in ((b"", b""), (EVENT, DONE), (b"", DONE)):
        assert take_comment(before + comment + after) == (before + after, REPORT)


@pytest.mark.parametrize("chunk", [EVENT + DONE, b": prfaas {", b'data: ": prfaas {}"\n\n'])
def test_stream_without_a_report_is_unchanged(chunk: bytes) -> None:
    assert take_comment(chunk) == (chunk, None)


@dataclass
class Output:
    kv_transfer_params: dict[str, Any] | None = None


async def _results(*outputs: Any) -> AsyncIterator[Any]:
    for output in outputs:
        yield output


async def _stream(prompt: str, result_generator: AsyncIterator[Any], *, name: str) -> AsyncIterator[str]:
    """Write one event for each result, as vLLM's generators do."""
    async for _ in result_generator:
        yield f"data: {prompt} {name}\n\n"
    yield "data: [DONE]\n\n"


async def test_streams_of_engines_end_with_the_report() -> None:
    stream_report = pytest.importorskip("prfaas.connector.vllm.stream_report", reason="needs vLLM")
    stream = stream_report.with_report(_stream)
    outputs = [Output(), (0, Output(REPORT.to_params()))]
    events = [event async for event in stream("p", _results(*outputs), name="n")]
    assert events == ["data: p n\n\n", "data: p n\n\n", to_comment(REPORT.to_params()), "data: [DONE]\n\n"]
    plain = [event async for event in stream("p", result_generator=_results(Output()), name="n")]
    assert plain == ["data: p n\n\n", "data: [DONE]\n\n"]
