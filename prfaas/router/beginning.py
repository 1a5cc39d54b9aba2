"""How an engine's answer begins: a stream that failed before it said anything is an error, whatever its status was."""

from __future__ import annotations

import re

import aiohttp
import msgspec

_EVENT_END = re.compile(rb"\r?\n\r?\n")  # vLLM ends its lines with \n, others of the same protocol with both
_ROLE = b'"delta":{"role":"assistant","content":""}'  # vLLM's first event of a chat, also of one that has failed
_ERROR = b'data: {"error"'  # vLLM's answer where the request failed once its status was sent; texts have their quotes escaped
MAX_HELD_BYTES = 64 << 10  # a fault is shorter; a first event that says what a prompt's tokens weighed is megabytes


class _Error(msgspec.Struct):
    code: int


class _Event(msgspec.Struct):
    error: _Error


async def beginning(response: aiohttp.ClientResponse) -> bytes:
    """The first bytes of an answer; of a stream up to the first event that says something, or as many as an error has."""
    first = await response.content.readany()
    while response.content_type == "text/event-stream" and len(first) < MAX_HELD_BYTES:
        if len(_EVENT_END.findall(first)) > first.count(_ROLE) or response.content.at_eof():
            break
        first += await response.content.readany()
    return first


def streamed_error(first: bytes) -> tuple[int, str, bytes] | None:
    """Status, content type and body of the engine's fault with which a stream begins, as a plain answer would have them."""
    _, found, rest = first.partition(_ERROR)
    body = _EVENT_END.split((found + rest).removeprefix(b"data: "), maxsplit=1)[0]
    try:
        code = msgspec.json.decode(body, type=_Event).error.code if found else 0
    except msgspec.DecodeError:
        return None
    return (code, "application/json", body) if code >= 500 else None
