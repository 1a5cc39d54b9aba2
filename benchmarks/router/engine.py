"""An engine that costs next to nothing: the same answer to every completion at once, over asyncio's own protocols."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import uvloop

ANSWER = {
    "id": "cmpl-1",
    "object": "text_completion",
    "model": "m",
    "choices": [{"index": 0, "text": " fine", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101},
}
MODELS = {"object": "list", "data": [{"id": "m", "parent": None}]}
TOKENS = {"tokens": list(range(40_000, 95_000))}  # Tokens of 220 KB of text.


def _response(body: object) -> bytes:
    text = json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text)


ANSWERS = ((b"/v1/models", _response(MODELS)), (b"/tokenize", _response(TOKENS)))
OTHER = _response(ANSWER)


class Engine(asyncio.Protocol):
    """One connection; requests come one after the other."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: Any = None  # The transport of uvloop is no asyncio.Transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line[15:])
        if not end or len(rest) < length:
            return
        self._buffer = rest[length:]
        self._transport.write(next((answer for path, answer in ANSWERS if path in head[:40]), OTHER))


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
