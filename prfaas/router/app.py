"""The front door: takes OpenAI requests, decides, runs the legs, streams the answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import generate_latest

from prfaas import logs, metrics
from prfaas.router.config import RouterConfig
from prfaas.router.deciding import Deciding, Plan
from prfaas.router.fleet import Fleet, Instance
from prfaas.router.legs import JSON_HEADERS, LegFailed, Legs, OpenAnswer, end, first_answer
from prfaas.router.openai import BadRequest, Endpoint, ParsedRequest, error_body, parse
from prfaas.scheduler.route import EXPLANATIONS, Decision, route
from prfaas.scheduler.snapshot import RequestFacts
from prfaas.types import InstanceId

PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
MAX_REMEMBERED_DECISIONS = 1024
SESSION_HEADER = "x-session-id"  # names a conversation, so that its later turns go where its KV is
_log = logs.get("router")


@dataclass
class Record:
    """One request as `/debug/decision/<id>` and its log line show it."""

    request_id: str
    plan: Plan
    fallback: str | None = None
    status: int = 0
    ttft_seconds: float | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def decision(self) -> Decision:
        return self.plan.decision

    def to_dict(self) -> dict[str, Any]:
        facts, transfer_id = self.plan.facts, self.plan.transfer_id
        return {
            "request_id": self.request_id,
            "route": self.decision.route,
            "reason": self.decision.reason,
            "explanation": EXPLANATIONS[self.decision.reason],
            "decode": self.decision.decode,
            "prefill": self.decision.prefill,
            "decided_by": self.plan.decided_by,
            "num_prompt_tokens": facts.num_prompt_tokens,
            "num_cached_tokens": facts.num_cached_tokens,
            "counted": facts.counted,
            "transfer_id": transfer_id.hex() if transfer_id else None,
            "fallback": self.fallback,
            "status": self.status,
            "ttft_seconds": self.ttft_seconds,
        }


class Router:
    """The state behind the routes of one front door."""

    def __init__(
        self, config: RouterConfig, *, fleet: Fleet, deciding: Deciding, session: aiohttp.ClientSession
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._deciding = deciding
        self._legs = Legs(session)
        self._session = session
        self._records: OrderedDict[str, Record] = OrderedDict()

    # Completions

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, "completions")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, "chat")

    async def _complete(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        request_id = request.headers.get("x-request-id") or secrets.token_hex(16)
        try:
            raw = await request.read()
            parsed = parse(endpoint, raw)
            facts, token_ids = await self._facts(parsed)
            plan = await self._deciding.plan(facts, token_ids, session=request.headers.get(SESSION_HEADER, ""))
        except BadRequest as error:
            return _error(400, str(error), kind="invalid_request_error")
        except LegFailed as error:
            return _error(503, str(error), kind="service_unavailable")
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body is over {self._config.max_body_bytes} bytes", kind="invalid_request_error")
        record = self._remember(Record(request_id, plan))
        try:
            async with asyncio.timeout(self._config.request_timeout):
                return await self._run(request, parsed, raw, token_ids, record)
        except LegFailed as error:
            record.status = 503
            return _error(503, str(error), kind="service_unavailable")
        except TimeoutError:
            record.status = 504
            return _error(504, f"no answer within {self._config.request_timeout:.0f} s", kind="timeout")
        finally:
            self._finish(record)

    async def _facts(self, parsed: ParsedRequest) -> tuple[RequestFacts, list[int] | None]:
        """What decides the route; the prompt is tokenised only when it could exceed the threshold."""
        bound = parsed.max_prompt_tokens()
        if not parsed.transferable() or not self._is_base_model(parsed.model):
            return RequestFacts(bound, counted=False, transferable=False), None
        if bound <= self._fleet.threshold_tokens:
            return RequestFacts(bound, counted=False), None
        token_ids = parsed.token_ids or await self._tokenize(parsed)
        return RequestFacts(len(token_ids)), token_ids

    def _is_base_model(self, model: str | None) -> bool:
        return model is None or any(model in instance.base_models for instance in self._fleet)

    async def _tokenize(self, parsed: ParsedRequest) -> list[int]:
        decision = route(self._fleet.snapshot(), RequestFacts(0))
        if decision.decode is None:
            raise LegFailed("no_decode_instance", "no engine is ready")
        return await self._legs.tokenize(self._fleet[decision.decode], parsed.tokenize_body())

    async def _run(
        self, request: web.Request, parsed: ParsedRequest, raw: bytes, token_ids: list[int] | None, record: Record
    ) -> web.StreamResponse:
        if record.decision.decode is None:
            raise LegFailed("no_decode_instance", "no engine is ready")
        if record.decision.route == "remote" and token_ids is not None:
            with contextlib.suppress(_FellBack):
                return await self._remote(request, parsed, token_ids, record)
        return await self._local(request, parsed, raw, record)

    async def _local(
        self, request: web.Request, parsed: ParsedRequest, raw: bytes, record: Record
    ) -> web.StreamResponse:
        decode = self._instance(record.decision.decode)
        headers = _headers(record)
        answer = await self._legs.decode(decode, PATHS[parsed.endpoint], raw, headers)
        try:
            return await self._forward(request, answer, record)
        finally:
            answer.close()

    async def _remote(
        self, request: web.Request, parsed: ParsedRequest, token_ids: list[int], record: Record
    ) -> web.StreamResponse:
        """Both legs at once.

        Raises:
            _FellBack: one of them failed before the first byte; the request is to be answered locally.
        """
        decode, prefill = self._instance(record.decision.decode), self._instance(record.decision.prefill)
        grant = record.plan.grant
        headers = _headers(record)
        prefilling = asyncio.create_task(self._legs.prefill(prefill, parsed.prefill_body(token_ids, grant), headers))
        body = json.dumps(parsed.decode_body(token_ids, grant)).encode()
        try:
            answer = await first_answer(prefilling, self._legs.decode(decode, PATHS[parsed.endpoint], body, headers))
        except LegFailed as error:
            record.fallback = error.reason
            metrics.FALLBACKS.labels(reason=error.reason).inc()
            _log.warning("request.fallback", request_id=record.request_id, reason=error.reason, message=str(error))
            raise _FellBack from error
        else:
            try:
                return await self._forward(request, answer, record)
            finally:
                answer.close()
        finally:
            await end(prefilling)

    def _instance(self, name: InstanceId | None) -> Instance:
        """The instance that a decision names.

        Raises:
            LegFailed: it has left the fleet since.
        """
        if name is None or name not in self._fleet:
            raise LegFailed("no_decode_instance", f"{name} has just left; try again")
        return self._fleet[name]

    async def _forward(self, request: web.Request, answer: OpenAnswer, record: Record) -> web.StreamResponse:
        """Pass the answer on as it comes; after its first byte a failure can only break it off."""
        record.status = answer.response.status
        record.ttft_seconds = time.monotonic() - record.started
        headers = _answer_headers(record) | {
            "Content-Type": answer.response.headers.get("Content-Type", "application/json")
        }
        response = web.StreamResponse(status=answer.response.status, headers=headers)
        await response.prepare(request)
        try:
            async for chunk in answer.chunks():
                await response.write(chunk)
        except LegFailed as error:
            _log.warning("request.broke_off", request_id=record.request_id, message=str(error))
            if request.transport is not None:
                request.transport.abort()  # the client must not take half an answer for a whole one
            return response
        await response.write_eof()
        return response

    def _remember(self, record: Record) -> Record:
        self._records[record.request_id] = record
        if len(self._records) > MAX_REMEMBERED_DECISIONS:
            self._records.popitem(last=False)
        return record

    def _finish(self, record: Record) -> None:
        decision = record.decision
        metrics.REQUESTS.labels(route=decision.route, reason=decision.reason).inc()
        if record.ttft_seconds is not None:
            metrics.TTFT_SECONDS.labels(route=decision.route).observe(record.ttft_seconds)
        _log.info("request.complete", seconds=round(time.monotonic() - record.started, 6), **record.to_dict())

    # Everything else

    async def models(self, request: web.Request) -> web.StreamResponse:
        return await self.pass_on(request)

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """A path that needs no decision goes to a decode instance as it is."""
        decision = route(self._fleet.snapshot(), RequestFacts(0))
        if decision.decode is None:
            return _error(503, "no engine is ready", kind="service_unavailable")
        url = f"{self._fleet[decision.decode].url}{request.rel_url}"
        headers = {"Content-Type": request.content_type} if request.can_read_body else {}
        try:
            async with self._session.request(
                request.method, url, data=await request.read(), headers=headers
            ) as upstream:
                response = web.StreamResponse(status=upstream.status)
                response.content_type = upstream.content_type
                await response.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, OSError) as error:
            return _error(502, f"the engine did not answer: {error!r}", kind="bad_gateway")

    async def health(self, request: web.Request) -> web.Response:
        """200 when somebody can answer."""
        ready = self._fleet.decodes()
        states = {instance.address.name: instance.healthy for instance in self._fleet}
        return web.json_response(
            {"status": "ok" if ready else "no engine is ready", "instances": states}, status=200 if ready else 503
        )

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), content_type="text/plain", charset="utf-8")

    async def explain(self, request: web.Request) -> web.Response:
        record = self._records.get(request.match_info["request_id"])
        if record is None:
            return _error(404, "no recent request of that id", kind="not_found")
        return web.json_response(record.to_dict())


class _FellBack(Exception):
    """The remote route failed before its first byte."""


def _headers(record: Record) -> dict[str, str]:
    return {**JSON_HEADERS, "X-Request-Id": record.request_id}


def _answer_headers(record: Record) -> dict[str, str]:
    headers = {
        "x-request-id": record.request_id,
        "x-prfaas-route": record.decision.route,
        "x-prfaas-reason": record.decision.reason,
        "x-prfaas-cached-tokens": str(record.plan.facts.num_cached_tokens),
    }
    if record.plan.transfer_id is not None:
        headers["x-prfaas-transfer"] = record.plan.transfer_id.hex()
    if record.fallback is not None:
        headers["x-prfaas-fallback"] = record.fallback
    return headers


def _error(status: int, message: str, *, kind: str) -> web.Response:
    return web.Response(
        status=status, body=error_body(message, kind=kind, code=status), content_type="application/json"
    )


def make_app(router: Router, *, max_body_bytes: int) -> web.Application:
    """The routes of one front door."""
    app = web.Application(client_max_size=max_body_bytes)
    app.router.add_post("/v1/completions", router.completions)
    app.router.add_post("/v1/chat/completions", router.chat)
    app.router.add_get("/v1/models", router.models)
    app.router.add_get("/health", router.health)
    app.router.add_get("/metrics", router.metrics)
    app.router.add_get("/debug/decision/{request_id}", router.explain)
    app.router.add_route("*", "/v1/{path:.*}", router.pass_on)
    return app
