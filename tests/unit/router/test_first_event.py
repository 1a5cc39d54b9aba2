"""First event of a stream: an engine's error, or the start of an answer."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol

from prfaas.router.engines.legs import MAX_HELD_BYTES, EngineError, read_first_event, streamed_error
from tests.support.waiting import PATIENCE_SECONDS

ERROR = b'{"error": {"message": "no KV", "type": "InternalServerError", "param": null, "code": 500}}'
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TEXT = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("before", [b"", ROLE, b": keep-alive\n\n"])
@pytest.mark.parametrize("after", [b"\n\n", b"\r\n\r\n", b"\n\n" + DONE])
def test_streamed_server_error_becomes_a_plain_error(before: bytes, after: bytes) -> None:
    assert streamed_error(before + b"data: " + ERROR + after) == EngineError(500, "application/json", ERROR)


@pytest.mark.parametrize(
    "first",
    [
        b"",
        TEXT,
        ROLE + TEXT,
        b"data: " + ERROR.replace(b"500", b"400") + b"\n\n",  # A client error, which no other instance can help.
        b"data: " + ERROR[:-20],  # Truncated.
        b'data: {"error": "text"}\n\n',
        b"data: " + json.dumps({"choices": [{"text": 'data: {"error": {"code": 500}}\n\n'}]}).encode() + b"\n\n",
    ],
)
def test_anything_else_is_not_a_server_error(first: bytes) -> None:
    assert streamed_error(first) is None


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
async def test_stream_is_held_back_only_until_its_first_text(line_end: bytes) -> None:
    sent = (ROLE + TEXT).replace(b"\n", line_end)
    assert await _first_event_of(sent) == sent


async def test_long_first_event_is_not_held_back_to_its_end() -> None:
    sent = b"data: " + b"x" * MAX_HELD_BYTES
    assert await _first_event_of(sent) == sent


async def _first_event_of(sent: bytes) -> bytes:
    """Return the first event of a stream that has sent these bytes and continues later."""
    content = aiohttp.StreamReader(BaseProtocol(asyncio.get_running_loop()), limit=1 << 16)
    content.feed_data(sent)
    answer = cast(Any, SimpleNamespace(content=content, content_type="text/event-stream"))
    return await asyncio.wait_for(read_first_event(answer), PATIENCE_SECONDS)
