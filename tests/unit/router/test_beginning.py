"""Which beginning of a stream is an engine's fault, and which is an answer."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol

from prfaas.router.engines.legs import MAX_HELD_BYTES, read_first_event, streamed_error
from tests.support.waiting import PATIENCE_SECONDS

ERROR = b'{"error": {"message": "no KV", "type": "InternalServerError", "param": null, "code": 500}}'
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TEXT = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("before", [b"", ROLE, b": keep-alive\n\n"])
@pytest.mark.parametrize("after", [b"\n\n", b"\r\n\r\n", b"\n\n" + DONE])
def test_a_fault_is_answered_as_without_a_stream(before: bytes, after: bytes) -> None:
    assert streamed_error(before + b"data: " + ERROR + after) == (500, "application/json", ERROR)


@pytest.mark.parametrize(
    "first",
    [
        b"",
        TEXT,
        ROLE + TEXT,
        b"data: " + ERROR.replace(b"500", b"400") + b"\n\n",  # the request is at fault: nobody else answers it
        b"data: " + ERROR[:-20],  # broken off
        b'data: {"error": "text"}\n\n',
        b"data: " + json.dumps({"choices": [{"text": 'data: {"error": {"code": 500}}\n\n'}]}).encode() + b"\n\n",
    ],
)
def test_anything_else_is_passed_on(first: bytes) -> None:
    assert streamed_error(first) is None


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
async def test_no_more_of_a_stream_is_held_back_than_its_first_words_whatever_ends_its_lines(line_end: bytes) -> None:
    """The rest may be minutes away."""
    said = (ROLE + TEXT).replace(b"\n", line_end)
    assert await _beginning_of(said) == said


async def test_of_a_long_first_event_no_more_is_held_back_than_an_error_has() -> None:
    said = b"data: " + b"x" * MAX_HELD_BYTES
    assert await _beginning_of(said) == said


async def _beginning_of(said: bytes) -> bytes:
    """Of a stream that has said this and goes on later."""
    content = aiohttp.StreamReader(BaseProtocol(asyncio.get_running_loop()), limit=1 << 16)
    content.feed_data(said)
    answer = cast(Any, SimpleNamespace(content=content, content_type="text/event-stream"))
    return await asyncio.wait_for(read_first_event(answer), PATIENCE_SECONDS)
