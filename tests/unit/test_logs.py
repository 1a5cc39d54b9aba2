"""Logs: one JSON object a line, bound fields, one canonical line per unit of work."""

from __future__ import annotations

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


def test_bound_fields_stand_on_every_line_and_do_not_leak_back() -> None:
    stream = io.StringIO()
    logs.setup("agent", stream=stream, logger="prfaas")
    log = logs.get("agent")
    log.bind(peer="west").bind(rank=1).warning("late")
    log.warning("plain")
    bound, plain = written(stream)
    assert (bound["peer"], bound["rank"]) == ("west", 1)
    assert "peer" not in plain


def test_the_level_decides_what_is_written() -> None:
    stream = io.StringIO()
    logs.setup("agent", level="warning", stream=stream, logger="prfaas")
    logs.get("agent").info("quiet")
    logs.get("agent").error("loud")
    assert [line["event"] for line in written(stream)] == ["loud"]


def test_an_exception_brings_its_trace() -> None:
    stream = io.StringIO()
    logs.setup("agent", stream=stream, logger="prfaas")
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logs.get("agent").exception("step.failed")
    assert "RuntimeError: boom" in written(stream)[0]["trace"]


def test_work_writes_one_line_with_what_was_gathered_and_how_long_it_took() -> None:
    stream = io.StringIO()
    logs.setup("router", stream=stream, logger="prfaas")
    with logs.get("router").work("request", path="/v1/completions") as line:
        line.add(route="remote")
    (written_line,) = written(stream)
    assert written_line["event"] == "request.complete"
    assert (written_line["path"], written_line["route"]) == ("/v1/completions", "remote")
    assert written_line["seconds"] >= 0


def test_failed_work_writes_one_line_and_raises_on() -> None:
    stream = io.StringIO()
    logs.setup("router", stream=stream, logger="prfaas")
    with pytest.raises(ValueError, match="bad"), logs.get("router").work("request"):
        raise ValueError("bad")
    (line,) = written(stream)
    assert (line["event"], line["level"], line["error"]) == ("request.failed", "error", "ValueError: bad")


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
