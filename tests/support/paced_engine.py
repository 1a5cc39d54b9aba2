"""Server that speaks vLLM's HTTP API as the router uses it, with a set pace and every kind of failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from prfaas import grants
from prfaas.transfer_report import to_comment
from tests.support.waiting import until

MODEL = "m"
CHAT_BEGINS = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
STREAMED_ERROR = (
    b'data: {"error": {"message": "planned", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
)
STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}


@dataclass
class PacedEngine:
    """Engine that answers with the tokens "a", "b", "c", and records requests and disconnects.

    Attributes:
        status: Status of the answers, for the first `num_failures` of them; None for all.
        refuses_transfers: Requests with a transfer get status 500.
        fails_loads: Requests with a transfer fail in a stream's first event, as with `kv_load_failure_policy: fail`.
        hangs: Requests are accepted and never answered.
        holds_transfers: Requests with a transfer are accepted and never answered.
        keeps: `kv_transfer_params` of the answer to a prefill leg.
        reports: Returns the `kv_transfer_params` of the answer to a decode leg, by its transfer id.
        reports_first: In a stream that report stands before the first token, and not after the last.
        usage: Usage of the answers, in a stream's own event after the tokens.
        garbles: Half of each plain answer is missing.
        models: Content of /v1/models in place of the engine's models.
        prefill_seconds: Time before the first byte.
        prefilled_by: A decode leg waits until one of these engines has its prefill leg.
        sessions: x-session-id of each of `bodies`.
        says: Headers of streamed answers, in place of a router's.
        answers_probes: While it is not set, health checks get no answer.
    """

    healthy: bool = True
    status: int = 200
    refuses_transfers: bool = False
    fails_loads: bool = False
    hangs: bool = False
    holds_transfers: bool = False
    num_failures: int | None = None
    keeps: dict[str, Any] | None = None
    reports: Callable[[str], dict[str, Any]] | None = None
    reports_first: bool = False
    usage: dict[str, Any] | None = None
    garbles: bool = False
    models: Any = None
    prefill_seconds: float = 0.0
    prefilled_by: Sequence[PacedEngine] = ()
    token_seconds: float = 0.0
    break_after_tokens: int | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    authorizations: set[str] = field(default_factory=set)
    sessions: list[str] = field(default_factory=list)
    says: dict[str, str] = field(default_factory=dict)
    num_tokenised: int = 0
    num_probes: int = 0
    answers_probes: asyncio.Event = field(default_factory=asyncio.Event)
    num_broken_off: int = 0
    url: str = ""
    tls: ssl.SSLContext | None = None
    _runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        self.answers_probes.set()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/responses", self._complete)
        app.router.add_post("/v1/messages", self._complete)
        app.router.add_post("/v1/embeddings", self._embed)
        app.router.add_post("/v1/rerank", self._echo)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=self.tls).start()
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        self.num_probes += 1
        await self.answers_probes.wait()
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        if self.models is not None:
            return web.json_response(self.models)
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "us", "parent": None} for name in (MODEL,)]
        return web.json_response({"object": "list", "data": [*models, {**models[0], "id": "adapter", "parent": MODEL}]})

    async def _embed(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.request_ids.append(request.headers.get("X-Request-Id", ""))
        if self.hangs:
            await asyncio.sleep(3600)
        data = [{"object": "embedding", "index": 0, "embedding": [0.5]}]
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        return web.json_response({"object": "list", "model": MODEL, "data": data, "usage": usage})

    async def _echo(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        return web.json_response({"asked": body}, status=self.status)

    async def _tokenize(self, request: web.Request) -> web.Response:
        if self.status != 200:
            return web.json_response({"error": {"message": "planned"}}, status=self.status)
        self.num_tokenised += 1
        body = await request.json()
        text = body["prompt"] if "prompt" in body else json.dumps(body["messages"])
        return web.json_response({"tokens": list(text.encode())})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.request_ids.append(request.headers.get("X-Request-Id", ""))
        self.authorizations.add(request.headers.get("Authorization", ""))
        self.sessions.append(request.headers.get("x-session-id", ""))
        try:
            await self._wait(body, request.headers.get("X-Request-Id", ""))
            if self._fails() or (self.refuses_transfers and _has_transfer(body)):
                status = self.status if self.status != 200 else 500
                return web.json_response({"error": {"message": "planned"}}, status=status)
            chat = request.path.startswith("/v1/chat")
            if self.fails_loads and _has_transfer(body):
                return await self._stream_error(request, chat=chat)
            if body.get("stream"):
                return await self._stream(request, self._report(body), chat=chat)
            return await self._whole(body, chat=chat)
        except asyncio.CancelledError:
            self.num_broken_off += 1
            raise

    async def _wait(self, body: dict[str, Any], request_id: str) -> None:
        params = body.get("kv_transfer_params") or {}
        if self.hangs or (self.holds_transfers and _has_transfer(body)):
            await asyncio.sleep(3600)
        if self.prefilled_by and "do_remote_prefill" in params:
            await until(
                lambda: any(request_id in engine.request_ids for engine in self.prefilled_by), what="the prefill leg"
            )
        await asyncio.sleep(self.prefill_seconds)

    def _fails(self) -> bool:
        if self.num_failures is not None:
            self.num_failures -= 1
            self.status = self.status if self.num_failures >= 0 else 200
        return self.status != 200

    async def _whole(self, body: dict[str, Any], *, chat: bool) -> web.Response:
        await asyncio.sleep(3 * self.token_seconds)
        text = _chat_choice(body) if chat else {"text": "abc"}
        answer = json.dumps(
            {
                "id": "1",
                "object": "chat.completion" if chat else "text_completion",
                "created": 0,
                "model": MODEL,
                "choices": [{"index": 0, "finish_reason": "stop", **text}],
                "usage": self.usage or {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
                "kv_transfer_params": self._report(body) or self.keeps,
            }
        )
        if self.garbles:
            answer = answer[: len(answer) // 2]
        return web.Response(text=answer, content_type="application/json")

    async def _stream_error(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers=STREAM_HEADERS)
        await response.prepare(request)
        if chat:
            await response.write(CHAT_BEGINS)
        await asyncio.sleep(self.token_seconds)
        await response.write(STREAMED_ERROR)
        await response.write(b"data: [DONE]\n\n")
        return response

    def _report(self, body: dict[str, Any]) -> dict[str, Any]:
        params = body.get("kv_transfer_params") or {}
        if self.reports is None or "do_remote_prefill" not in params:
            return {}
        return self.reports(grants.unverified(grants.from_text(params["prfaas_grant"])).transfer_id.hex())

    async def _stream(self, request: web.Request, report: dict[str, Any], *, chat: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={**STREAM_HEADERS, **self.says})
        await response.prepare(request)
        for number, text in enumerate("abc"):
            if number == self.break_after_tokens:
                assert request.transport is not None
                request.transport.abort()
                return response
            comment = to_comment(report).encode() if self.reports_first and not number else b""
            await response.write(comment + streamed(text, chat=chat))
            await asyncio.sleep(self.token_seconds)
        if self.usage is not None:
            event = f"data: {json.dumps({'choices': [], 'usage': self.usage})}\n\n".encode()
            await response.write(event[:20])
            await asyncio.sleep(0)
            await response.write(event[20:])
        comment = b"" if self.reports_first else to_comment(report).encode()
        await response.write(comment + b"data: [DONE]\n\n")
        return response


@contextlib.asynccontextmanager
async def running(*engines: PacedEngine) -> AsyncIterator[None]:
    """Run engines. They also end with a block that fails, so that later tests find no open socket."""
    try:
        for engine in engines:
            await engine.start()
        yield
    finally:
        for engine in engines:
            await engine.stop()


def _chat_choice(body: dict[str, Any]) -> dict[str, Any]:
    """A chat's answer: "abc", or with tools a call of the first, its arguments the messages; log-probabilities if asked for."""
    message: dict[str, Any] = {"role": "assistant", "content": "abc"}
    if "tools" in body:
        called = {"name": body["tools"][0]["function"]["name"], "arguments": json.dumps(body["messages"])}
        message = {**message, "content": None, "tool_calls": [{"id": "1", "type": "function", "function": called}]}
    if not body.get("logprobs"):
        return {"message": message}
    tokens: list[dict[str, Any]] = [
        {"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []} for token in "abc"
    ]
    return {"message": message, "logprobs": {"content": tokens}}


def streamed(text: str, *, chat: bool = False) -> bytes:
    """Return one event of a stream."""
    choice = {
        "index": 0,
        "finish_reason": None,
        **({"delta": {"content": text}} if chat else {"text": text, "token_ids": [ord(text)]}),
    }
    event = {"id": "1", "object": "chunk", "created": 0, "model": MODEL, "choices": [choice]}
    return f"data: {json.dumps(event)}\n\n".encode()


def _has_transfer(body: dict[str, Any]) -> bool:
    """Return whether a leg has a transfer, and not only the reason why there is none."""
    return "prfaas_fallback" not in body.get("kv_transfer_params", {"prfaas_fallback": None})
