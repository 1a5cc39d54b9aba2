"""A small server that speaks vLLM's HTTP as the router uses it: paced, and able to fail in every way an engine can."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

MODEL = "m"


@dataclass
class PacedEngine:
    """Answers with the tokens "a", "b", "c"; remembers what it was asked and what the client broke off."""

    healthy: bool = True
    status: int = 200
    prefill_seconds: float = 0.0  # before anything comes
    token_seconds: float = 0.0
    break_after_tokens: int | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    num_broken_off: int = 0
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/embeddings", self._embed)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        models = [{"id": MODEL, "parent": None}, {"id": "adapter", "parent": MODEL}]
        return web.json_response({"object": "list", "data": models})

    async def _embed(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [], "echo": await request.json()})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        text = body["prompt"] if "prompt" in body else json.dumps(body["messages"])
        return web.json_response({"tokens": list(text.encode())})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.request_ids.append(request.headers.get("X-Request-Id", ""))
        try:
            await asyncio.sleep(self.prefill_seconds)
            if self.status != 200:
                return web.json_response({"error": {"message": "planned"}}, status=self.status)
            return await (self._stream(request) if body.get("stream") else self._whole())
        except asyncio.CancelledError:
            self.num_broken_off += 1
            raise

    async def _whole(self) -> web.Response:
        await asyncio.sleep(3 * self.token_seconds)
        return web.json_response({"choices": [{"text": "abc", "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, text in enumerate("abc"):
            if number == self.break_after_tokens:
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(f'data: {{"choices": [{{"text": "{text}"}}]}}\n\n'.encode())
            await asyncio.sleep(self.token_seconds)
        await response.write(b"data: [DONE]\n\n")
        return response
