"""What a client is told of a request that is not answered."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal

from aiohttp import web
from prometheus_client import generate_latest

from prfaas import metrics, tracing
from prfaas.router.config import RouterConfig
from prfaas.router.engines.fleet import Fleet
from prfaas.router.engines.legs import LegFailed
from prfaas.router.http.admission import AdmissionRefused, Client, OperatorKeys, RequestAdmission
from prfaas.router.http.proxy import PathRefused, Proxy, check_path
from prfaas.router.openai.headers import SESSION_HEADER, request_id_of, session_of
from prfaas.router.openai.request import BYTES_PER_TOKEN, BadRequest, Endpoint, error_body, parse
from prfaas.router.routing.record import RequestRecord, RequestRecords
from prfaas.router.routing.serve import NoEngineReady, RequestHandler

REFUSALS = (
    BadRequest,
    PathRefused,
    web.RequestPayloadError,
    web.HTTPRequestEntityTooLarge,
    NoEngineReady,
    AdmissionRefused,
    LegFailed,
)


def error_response(status: int, message: str, *, kind: str) -> web.Response:
    """Return an error as OpenAI clients expect it."""
    body = error_body(message, kind=kind, code=status)
    return web.Response(status=status, body=body, content_type="application/json")


def refused(error: Exception, *, max_body_bytes: int) -> web.Response:
    """What a client is told of one of `REFUSALS`."""
    match error:
        case BadRequest():
            return error_response(400, str(error), kind="invalid_request_error")
        case PathRefused():
            return error_response(403, str(error), kind="permission_error")
        case web.RequestPayloadError():
            return error_response(400, f"the body cannot be read: {error}", kind="invalid_request_error")
        case web.HTTPRequestEntityTooLarge():
            return error_response(413, f"the body exceeds {max_body_bytes} bytes", kind="invalid_request_error")
        case AdmissionRefused(status=429):
            response = error_response(429, str(error), kind="rate_limit_error")
            response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_seconds)))
            return response
        case AdmissionRefused():
            return error_response(error.status, str(error), kind="authentication_error")
        case LegFailed():
            return _failed(error)
        case _:
            return error_response(503, str(error), kind="service_unavailable")


def _failed(failure: LegFailed) -> web.Response:
    """Return the engine's own error where it made one; otherwise that nobody could be reached."""
    if failure.answer is None:
        return error_response(503, f"{failure.reason}: no engine answered", kind="service_unavailable")
    headers = {"Content-Type": failure.answer.content_type}
    return web.Response(status=failure.answer.status, body=failure.answer.body, headers=headers)


CLIENT_GONE = 499  # the status of a request whose client left, as nginx logs it


class Router:
    """The state behind the routes of one front door."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        *,
        answering: RequestHandler,
        passing: Proxy,
        admission: RequestAdmission,
        operators: OperatorKeys,
        records: RequestRecords,
        report: Callable[[RequestRecord], None],
    ) -> None:
        """`report` hears of every request that has ended."""
        self._config = config
        self._admission = admission
        self._operators = operators
        self._fleet = fleet
        self._answering = answering
        self._passing = passing
        self._records = records
        self._report = report

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, "completions")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, "chat")

    async def _complete(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        record = RequestRecord(request_id_of(request.headers.get("x-request-id")))
        parent = request.headers.get(tracing.HEADER, "")
        with tracing.within(tracing.root("router.request", parent=parent, request_id=record.request_id)) as span:
            try:
                return await self._in_time(self._answer(request, endpoint, record), record)
            finally:
                if span.traceparent:
                    span.note(**record.attributes())

    async def _in_time(self, answer: Awaitable[web.StreamResponse], record: RequestRecord) -> web.StreamResponse:
        try:
            async with asyncio.timeout(self._config.request_timeout):
                return await answer
        except TimeoutError:
            record.status = 504
            late = error_response(504, f"no answer within {self._config.request_timeout:g} s", kind="timeout")
            late.headers.update(record.headers())
            return late
        except asyncio.CancelledError:
            record.status = CLIENT_GONE
            raise
        finally:
            record.ended()
            # Not before the answer has left: what only we read costs the client nothing.
            asyncio.get_running_loop().call_soon(self._tell, record)

    def _tell(self, record: RequestRecord) -> None:
        record.tell()
        self._report(record)

    async def _answer(self, request: web.Request, endpoint: Endpoint, record: RequestRecord) -> web.StreamResponse:
        try:
            client = self._admission.admit(request.headers.get("Authorization"))
            record.client = client.name
            self._records.add(record)
            with self._admission.place():
                parsed = parse(endpoint, await request.read(), tenant=client.tenant)
                session = session_of(request.headers.get(SESSION_HEADER))
                with self._charged(client, parsed.estimated_prompt_tokens, record):
                    return await self._answering.answer(request, parsed, record, session=session)
        except REFUSALS as error:
            response = refused(error, max_body_bytes=self._config.max_body_bytes)
        record.status = response.status
        response.headers.update(record.headers())
        return response

    @contextlib.contextmanager
    def _charged(self, client: Client, estimated_tokens: int, record: RequestRecord) -> Iterator[None]:
        """Around an answer: the prompt counts as estimated until it is known what both were."""
        self._admission.charge(client, estimated_tokens)
        try:
            yield
        finally:
            used = record.num_tokens(estimated_tokens)
            self._admission.settle(client, estimated=estimated_tokens, used=used)

    @contextlib.contextmanager
    def _charged_when_passed_on(self, client: Client, num_tokens: int) -> Iterator[None]:
        """Around an answer that is not read: what is refused costs nothing."""
        self._admission.charge(client, num_tokens)
        used = num_tokens
        try:
            yield
        except REFUSALS:
            used = 0
            raise
        finally:
            self._admission.settle(client, estimated=num_tokens, used=used)

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Return a path that needs no decision goes to a decode instance as it is."""
        record = RequestRecord(request_id_of(request.headers.get("x-request-id")), path=request.path)
        return await self._in_time(self._pass_on(request, record), record)

    async def _pass_on(self, request: web.Request, record: RequestRecord) -> web.StreamResponse:
        response: web.StreamResponse
        try:
            client = self._admission.admit(request.headers.get("Authorization"))
            check_path(request.path)
            with self._admission.place():
                num_tokens = len(await request.read()) // BYTES_PER_TOKEN  # of the prompt; its answer is not read
                with self._charged_when_passed_on(client, num_tokens):
                    response = await self._passing.pass_on(request, tenant=client.tenant, headers=record.headers())
        except REFUSALS as error:
            response = refused(error, max_body_bytes=self._config.max_body_bytes)
            response.headers.update(record.headers())
        record.status = response.status
        return response

    async def health(self, request: web.Request) -> web.Response:
        """200 when somebody can answer; operators also see who."""
        ready = self._fleet.any_decode() is not None
        said: dict[str, object] = {"status": "ok" if ready else "no engine is ready"}
        if self._operators.may_see(request.headers.get("Authorization")):
            said["instances"] = {instance.address.name: instance.healthy for instance in self._fleet}
        return web.json_response(said, status=200 if ready else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        refusal = self._refusal(request, "metrics")
        if refusal is not None:
            return refusal
        return web.Response(body=generate_latest(), content_type="text/plain", charset="utf-8")

    async def explain(self, request: web.Request) -> web.Response:
        """Why a recent request went where it went."""
        refusal = self._refusal(request, "decision")
        if refusal is not None:
            return refusal
        found = [record.explanation() for record in self._records.of(request.match_info["request_id"])]
        if not found:
            return error_response(404, "no recent request of that id", kind="not_found")
        return web.json_response(found[0] | ({"others": found[1:]} if found[1:] else {}))

    def _refusal(self, request: web.Request, page: Literal["metrics", "decision"]) -> web.Response | None:
        """What somebody is told who may not see a page of operators; None: he may."""
        if self._operators.may_see(request.headers.get("Authorization")):
            return None
        metrics.PAGE_REFUSALS.labels(page=page).inc()
        message = "an operator's page: send a key of operator_keys_file as Authorization: Bearer <key>"
        return error_response(401, message, kind="authentication_error")


def make_app(router: Router, *, max_body_bytes: int) -> web.Application:
    """Return the routes of one front door."""
    app = web.Application(client_max_size=max_body_bytes)
    app.router.add_post("/v1/completions", router.completions)
    app.router.add_post("/v1/chat/completions", router.chat)
    app.router.add_get("/health", router.health)
    app.router.add_get("/metrics", router.metrics)
    app.router.add_get("/debug/decision/{request_id}", router.explain)
    app.router.add_route("*", "/v1/{path:.*}", router.pass_on)
    return app
