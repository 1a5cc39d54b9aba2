"""HTTP routes of the router, and the errors that clients get."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from prometheus_client import generate_latest

from prfaas import metrics, tracing
from prfaas.router.engines.fleet import Fleet
from prfaas.router.engines.legs import LegFailed
from prfaas.router.http.admission import AdmissionRefused, Client, OperatorKeys, RequestAdmission
from prfaas.router.http.budget import ClientBudget
from prfaas.router.http.limits import HANDLED, ClientConnections, HeldBody
from prfaas.router.http.proxy import PathRefused, Proxy, check_path
from prfaas.router.openai.headers import SESSION_HEADER, request_id_of, session_of
from prfaas.router.openai.request import BYTES_PER_TOKEN, MAX_BODY_BYTES, PATHS, BadRequest, Endpoint, error_body, parse
from prfaas.router.routing.manager_client import DecisionClient
from prfaas.router.routing.record import CLIENT_GONE, RequestRecord, RequestRecords, outcome_of_status
from prfaas.router.routing.serve import NoEngineReady, RequestHandler, stream_response

SPAN_FIELDS = (
    "route",
    "reason",
    "decided_by",
    "num_prompt_tokens",
    "transfer_id",
    "fallback",
    "status",
    "ttft_seconds",
)
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
    """Return an error in OpenAI's form."""
    body = error_body(message, kind=kind, code=status)
    return web.Response(status=status, body=body, content_type="application/json")


def timeout_response(seconds: float) -> web.Response:
    """Return the error for an answer that has not ended in time."""
    return error_response(504, f"no answer within {seconds:g} s", kind="timeout")


def refusal_response(error: Exception) -> web.Response:
    """Return the response for one of `REFUSALS`."""
    match error:
        case BadRequest():
            return error_response(400, str(error), kind="invalid_request_error")
        case PathRefused():
            return error_response(403, str(error), kind="permission_error")
        case web.RequestPayloadError():
            return error_response(400, f"the body cannot be read: {error}", kind="invalid_request_error")
        case web.HTTPRequestEntityTooLarge():
            return error_response(413, f"the body exceeds {MAX_BODY_BYTES} bytes", kind="invalid_request_error")
        case AdmissionRefused(status=429):
            response = error_response(429, str(error), kind="rate_limit_error")
            response.headers["Retry-After"] = "1"
            return response
        case AdmissionRefused(status=408):
            return error_response(408, str(error), kind="timeout")
        case AdmissionRefused():
            return error_response(error.status, str(error), kind="authentication_error")
        case LegFailed(answer=None):
            return error_response(503, f"{error.reason}: no engine answered", kind="service_unavailable")
        case LegFailed(answer=answer) if answer is not None:
            headers = {"Content-Type": answer.content_type}
            return web.Response(status=answer.status, body=answer.body, headers=headers)
        case _:
            return error_response(503, str(error), kind="service_unavailable")


class UnhandledRequests(AbstractAccessLogger):
    """Counter of the requests that reach none of the handlers: malformed HTTP, and unknown paths and methods."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if not request.get(HANDLED):
            outcome = outcome_of_status(response.status)
            metrics.REQUESTS.labels(status=str(response.status), route="none", outcome=outcome).inc()


@dataclass(frozen=True)
class Router:
    """Handlers of the routes. The manager, if any, hears of every completed request."""

    fleet: Fleet
    handler: RequestHandler
    proxy: Proxy
    admission: RequestAdmission
    operators: OperatorKeys
    records: RequestRecords
    manager: DecisionClient | None
    request_timeout: float
    connections: ClientConnections
    bodies: ClientBudget
    body_seconds: float

    async def complete(self, request: web.Request, *, endpoint: Endpoint) -> web.StreamResponse:
        """Answer a completion or a chat."""
        record = RequestRecord(request_id_of(request.headers.get("x-request-id")))
        parent = request.headers.get(tracing.HEADER, "")
        with tracing.within(tracing.root("router.request", parent=parent, request_id=record.request_id)) as span:
            try:
                return await self._in_time(self._answer(request, endpoint, record), record)
            finally:
                if span.traceparent:
                    summary = record.summary()
                    span.note(**{name: summary.get(name) for name in SPAN_FIELDS})

    async def _in_time(self, answer: Awaitable[web.StreamResponse], record: RequestRecord) -> web.StreamResponse:
        try:
            async with asyncio.timeout(self.request_timeout):
                return await answer
        except TimeoutError:
            record.status, record.is_broken = 504, record.ttft_seconds is not None
            late = timeout_response(self.request_timeout)
            late.headers.update(record.headers())
            return late
        except asyncio.CancelledError:
            record.status = CLIENT_GONE
            raise
        except Exception:
            record.status = 500
            raise
        finally:
            record.end()
            # The answer leaves first, so that bookkeeping costs the client nothing.
            asyncio.get_running_loop().call_soon(self._report, record)

    def _report(self, record: RequestRecord) -> None:
        record.publish()
        if self.manager is not None and (report := record.manager_report()) is not None:
            self.manager.reports.add(report)

    async def _answer(self, request: web.Request, endpoint: Endpoint, record: RequestRecord) -> web.StreamResponse:
        try:
            client = self.admission.admit(request.headers.get("Authorization"))
            record.client = client.name
            self.records.add(record)
            with self._hold(request, client) as body:
                parsed = parse(endpoint, await body.read(request), tenant=client.tenant)
                session = session_of(request.headers.get(SESSION_HEADER))
                with self.admission.place(client):
                    record.estimated_prompt_tokens = parsed.estimated_prompt_tokens
                    opening = self.handler.open(parsed, record, session=session)
                    del parsed
                    answer = await opening
                    body.release()  # Nothing refers to it any more.
                    return await stream_response(request, answer, record)
        except REFUSALS as error:
            return _refuse(error, record)

    def _hold(self, request: web.Request, client: Client) -> HeldBody:
        """Return the body of a client's request, which counts for its key, or for its address if all keys are equal."""
        owner = client.name if self.admission.has_several_clients else self.connections.address(request)
        return HeldBody(self.bodies, owner, seconds=self.body_seconds)

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Forward a request for a path that needs no decision to a decode instance."""
        record = RequestRecord(request_id_of(request.headers.get("x-request-id")), path=request.path)
        return await self._in_time(self._forward(request, record), record)

    async def _forward(self, request: web.Request, record: RequestRecord) -> web.StreamResponse:
        try:
            client = self.admission.admit(request.headers.get("Authorization"))
            check_path(request.path)
            with self._hold(request, client) as body:
                raw = await body.read(request)
                with self.admission.place(client):
                    record.estimated_prompt_tokens = len(raw) // BYTES_PER_TOKEN
                    opening = self.proxy.open(request, raw, record, tenant=client.tenant)
                    del raw
                    answer = await opening
                    body.release()  # Nothing refers to it any more.
                    return await stream_response(request, answer, record)
        except REFUSALS as error:
            return _refuse(error, record)

    async def health(self, request: web.Request) -> web.Response:
        """Return 200 if an instance can answer. Operators also see the instances."""
        ready = self.fleet.any_decode() is not None
        page: dict[str, object] = {"status": "ok" if ready else "no engine is ready"}
        if self.operators.may_see(request.headers.get("Authorization")):
            if self.fleet.is_stale:
                page["fleet"] = "stale: no manager has answered since the start"
            page["instances"] = {
                instance.address.name: instance.healthy and instance.silent_since is None for instance in self.fleet
            }
        return web.json_response(page, status=200 if ready else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        return self._refuse_page(request, "metrics") or metrics_response()

    async def explain(self, request: web.Request) -> web.Response:
        """Return the decision for a recent request, and the reasons."""
        refusal = self._refuse_page(request, "decision")
        if refusal is not None:
            return refusal
        found = [record.explanation() for record in self.records.of(request.match_info["request_id"])]
        if not found:
            return error_response(404, "no recent request of that id", kind="not_found")
        return web.json_response(found[0] | ({"others": found[1:]} if found[1:] else {}))

    def _refuse_page(self, request: web.Request, page: Literal["metrics", "decision"]) -> web.Response | None:
        """Return the refusal of an operators' page; None if the sender may see it."""
        if self.operators.may_see(request.headers.get("Authorization")):
            return None
        metrics.PAGE_REFUSALS.labels(page=page).inc()
        message = "only for operators: send a key of operator_keys_file as Authorization: Bearer <key>"
        return error_response(401, message, kind="authentication_error")


def _refuse(error: Exception, record: RequestRecord) -> web.Response:
    """Return the response for one of `REFUSALS`, and note its status."""
    response = refusal_response(error)
    record.status = response.status
    response.headers.update(record.headers())
    return response


def metrics_response() -> web.Response:
    """Return the page of Prometheus metrics."""
    return web.Response(body=generate_latest(), content_type="text/plain", charset="utf-8")


def make_app(router: Router, connections: ClientConnections) -> web.Application:
    """Return the routes of one router."""
    app = web.Application(middlewares=[connections.middleware()])
    for endpoint, path in PATHS.items():
        app.router.add_post(path, partial(router.complete, endpoint=endpoint))
    app.router.add_get("/health", router.health)
    app.router.add_get("/metrics", router.metrics)
    app.router.add_get("/debug/decision/{request_id}", router.explain)
    app.router.add_route("*", "/v1/{path:.*}", router.forward)
    return app
