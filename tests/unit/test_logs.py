"""Logs: one JSON object a line."""

import io
import json
import logging
from typing import Any

import pytest
from aiohttp.http_exceptions import BadStatusLine

from prfaas import logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object_with_event_and_fields() -> None:
    stream = io.StringIO()
    logs.setup("agent", stream=stream, logger="prfaas")
    logs.get("agent.send").info("transfer.complete", transfer_id=b"\x01\xff", num_bytes=7, peers=("a", "b"))
    (line,) = written(stream)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "component": "agent",
        "logger": "prfaas.agent.send",
        "event": "transfer.complete",
        "transfer_id": "01ff",
        "num_bytes": 7,
        "peers": ["a", "b"],
    }


def test_a_field_cannot_hide_the_head_of_a_line() -> None:
    stream = io.StringIO()
    logs.setup("agent", stream=stream, logger="prfaas")
    logs.get("agent").info("real", level="fake", time=0)
    assert written(stream)[0]["level"] == "info"


def test_an_exception_brings_its_trace() -> None:
    stream = io.StringIO()
    logs.setup("agent", stream=stream, logger="prfaas")
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logs.get("agent").exception("step.failed")
    assert "RuntimeError: boom" in written(stream)[0]["trace"]


def test_a_terminal_gets_text() -> None:
    stream = Terminal()
    logs.setup("agent", stream=stream, logger="prfaas")
    logs.get("agent").info("engine.attached", instance="p0")
    assert stream.getvalue().split()[1:] == ["INFO", "engine.attached", "instance=p0"]


def test_a_line_of_the_standard_library_keeps_its_message() -> None:
    stream = io.StringIO()
    logs.setup("agent", stream=stream, logger="prfaas")
    logging.getLogger("prfaas.foreign").warning("%d left", 3)
    assert written(stream)[0]["event"] == "3 left"


def test_what_strangers_send_that_is_not_http_and_who_has_left_fill_no_log() -> None:
    stream = io.StringIO()
    logs.setup("router", stream=stream, logger="aiohttp.server")
    for error in (BadStatusLine("GET"), ConnectionResetError("gone"), RuntimeError("ours")):
        logging.getLogger("aiohttp.server").error("Error handling request", exc_info=error)
    (line,) = written(stream)
    assert "RuntimeError: ours" in line["trace"]


def test_under_another_programs_handler_the_fields_are_still_there(caplog: pytest.LogCaptureFixture) -> None:
    logs.get("connector").warning("fallback", reason="deadline")
    assert caplog.messages == ["fallback reason=deadline"]
