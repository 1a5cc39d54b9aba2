"""Which beginning of a stream is an engine's fault, and which is an answer."""

from __future__ import annotations

import json

import pytest

from prfaas.router.beginning import streamed_error

ERROR = b'{"error": {"message": "no KV", "type": "InternalServerError", "param": null, "code": 500}}'
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TEXT = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("before", [b"", ROLE, b": keep-alive\n\n"])
@pytest.mark.parametrize("after", [b"\n\n", b"\n\n" + DONE])
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
