"""Service of one completion or chat: decide, send the legs, retry before the first byte, and stream the answer."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from aiohttp import web

from prfaas import logs, tracing
from prfaas.router.config import PdProtocol
from prfaas.router.engines.fleet import EngineSilent, Fleet, Instance
from prfaas.router.engines.legs import UNREACHABLE, EngineResponse, LegClient, LegFailed, SentLeg
from prfaas.router.engines.usage import HandedOverResponse, cached_tokens
from prfaas.router.openai.request import PATHS, ParsedRequest, error_body, nixl_prefill_body, with_transfer_params
from prfaas.router.openai.tokenizer import Tokenizer
from prfaas.router.routing.decide import DecisionMaker
from prfaas.router.routing.plan import RoutePlan, RoutingRequest
from prfaas.router.routing.record import RequestRecord
from prfaas.scheduler.route import EXPLANATIONS, Decision
from prfaas.scheduler.snapshot import RequestFacts
from prfaas.transfer_report import RECEIVED_KEY, received_report, take_comment
from prfaas.types import ClusterName, InstanceId

MAX_TRIES = 4  # Decode legs of one request.
SHORT_BODY_BYTES = 16 << 10  # No model is too short for such a prompt, or its engine refuses it cheaply.


_LOST_DECODE = ("decode_unreachable", "decode_broke_off", "decode_silent")  # Another instance must decode.


class _Answer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


_ANSWER = msgspec.json.Decoder(_Answer)
_log = logs.get("router")


class NoEngineReady(Exception):
    """No engine can answer. The text is for the client."""

    @classmethod
    def of(cls, decision: Decision) -> NoEngineReady:
        """Return the error for a decision without a decode instance."""
        return cls(f"{decision.reason}: {EXPLANATIONS[decision.reason]}")


@dataclass(frozen=True)
class RequestHandler:
    """Serves completions and chats."""

    fleet: Fleet
    decisions: DecisionMaker
    legs: LegClient
    tokenizer: Tokenizer
    pd_protocol: PdProtocol = "prfaas"
    cluster: ClusterName | None = None
    has_overflow: bool = False
    clusters_of_tenants: Mapping[str, frozenset[ClusterName]] = field(default_factory=dict)

    async def open(self, parsed: ParsedRequest, record: RequestRecord, *, session: str) -> EngineResponse:
        """Return the first response whose first bytes have come.

        Raises:
            NoEngineReady: there is no healthy decode instance.
            LegFailed: every instance tried failed before its first byte.
        """
        routing = await self.routing_request(parsed, session)
        plan = await self.decisions.plan(routing)
        while True:
            record.note_plan(plan)
            try:
                return await self._send_legs(plan, routing, parsed, record)
            except LegFailed as failure:
                record.note_failure(failure)
                if len(record.failures) >= MAX_TRIES:
                    raise failure.without_traceback() from None
                routing, plan = await self._replan(failure.without_traceback(), routing, plan)

    async def routing_request(self, parsed: ParsedRequest, session: str) -> RoutingRequest:
        """Return the facts that decide the route. The prompt is tokenised only if it could exceed the threshold.

        Raises:
            BadRequest: the prompt cannot fit the model.
            NoEngineReady: there is no healthy decode instance, or the tenant belongs to other clusters.
        """
        if len(parsed.raw) > SHORT_BODY_BYTES:
            parsed.check_length(self.fleet.max_model_len(parsed.model))
        facts = RequestFacts(
            parsed.max_prompt_tokens,
            counted=False,
            obstacle=parsed.obstacle() or ("adapter" if not self.fleet.is_base_model(parsed.model) else None),
            turn=parsed.turn,
            max_output_tokens=parsed.max_output_tokens,
            seed=secrets.randbits(32),
            clusters=self.clusters_of_tenants.get(parsed.tenant, frozenset()),
            home=self.cluster if self.has_overflow else None,
        )
        if facts.clusters and self.cluster not in facts.clusters:
            raise NoEngineReady("this router's cluster may not see the prompts of your tenant")
        prompt = None
        if facts.obstacle is None and self.fleet.must_count(facts.num_prompt_tokens):
            prompt = await self._tokenize(parsed)
            if prompt is None:
                facts = replace(facts, obstacle="not_tokenised")
            else:
                facts = replace(facts, num_prompt_tokens=len(prompt), counted=True)
        return RoutingRequest(facts, parsed.model, prompt, session, parsed.tenant)

    async def _tokenize(self, parsed: ParsedRequest) -> list[int] | None:
        while True:
            instance = self.fleet.any_decode(parsed.model, parsed.tenant)
            if instance is None:
                raise NoEngineReady("no engine is ready")
            with (
                contextlib.suppress(EngineSilent),  # Another engine tokenises.
                tracing.within(tracing.child("router.tokenize", instance=instance.address.name)),
            ):
                async with instance.watched("decode"):
                    return await self.tokenizer.token_ids(instance, parsed)

    async def _replan(
        self, failure: LegFailed, routing: RoutingRequest, plan: RoutePlan
    ) -> tuple[RoutingRequest, RoutePlan]:
        """Return the plan after a failure: the same decode instance without a transfer, or another decode instance.

        Raises:
            LegFailed: `failure`, if nothing is left to try.
        """
        if plan.is_remote and failure.reason not in _LOST_DECODE:
            return routing, replace(plan, fell_back=True)
        assert plan.decision.decode is not None, "a plan without a decode instance opens no legs"
        excluded = routing.facts.excluded | {plan.decision.decode}
        routing = replace(routing, facts=replace(routing.facts, excluded=excluded))
        plan = await self.decisions.plan(routing)
        if plan.decision.decode is None:
            raise failure
        return routing, plan

    async def _send_legs(
        self, plan: RoutePlan, routing: RoutingRequest, parsed: ParsedRequest, record: RequestRecord
    ) -> EngineResponse:
        if plan.decision.decode is None:
            raise NoEngineReady.of(plan.decision)
        decode, path = self._instance("decode", plan.decision.decode), PATHS[parsed.endpoint]
        num_tokens, prompt = routing.facts.num_prompt_tokens, routing.prompt
        headers = {"Content-Type": "application/json", "X-Request-Id": record.request_id}
        if not plan.is_remote or plan.decision.prefill is None or prompt is None:
            # NIXL's connector would take any parameters for its own.
            fallback = record.fallback_params() if self.pd_protocol == "prfaas" else {}
            body = parsed.local_body(plan.promised_tokens, fallback=fallback)
            return await self._decode(decode, path, lambda trace: body, headers, num_tokens)
        prefill = self._instance("prefill", plan.decision.prefill)
        if self.pd_protocol == "nixl" and prefill.address.cluster == decode.address.cluster:
            with _leg_span("router.prefill", prefill):
                body, sent = nixl_prefill_body(path, parsed.body), headers | tracing.headers()
                params, answer = await self.legs.prefill(
                    prefill, body, sent, path=path, num_tokens=num_tokens, is_nixl=True
                )
            record.note_prefilled()
            decode_body = with_transfer_params(parsed.raw, params)
            response = await self._decode(decode, path, lambda trace: decode_body, headers, num_tokens)
            return HandedOverResponse.of(response, cached_tokens(answer))
        prefill_leg = asyncio.create_task(self._prefill(prefill, plan, prompt, parsed, headers))
        prefill_leg.add_done_callback(lambda _: record.note_prefilled())

        def body_with_grant(trace: str) -> bytes:
            return parsed.decode_body(prompt, plan.grant, trace=trace)

        decode_leg = asyncio.create_task(self._decode(decode, path, body_with_grant, headers, len(prompt)))
        return await self.legs.both(prefill_leg, decode_leg)

    async def _prefill(
        self, instance: Instance, plan: RoutePlan, token_ids: list[int], parsed: ParsedRequest, headers: dict[str, str]
    ) -> None:
        with _leg_span("router.prefill", instance) as span:
            promised, trace = plan.promised_tokens, span.traceparent
            body = parsed.prefill_body(token_ids, plan.grant, promised_tokens=promised, trace=trace)
            await self.legs.prefill(instance, body, headers | tracing.headers(), num_tokens=len(token_ids))

    async def _decode(
        self, instance: Instance, path: str, body: Callable[[str], bytes], headers: dict[str, str], num_tokens: int
    ) -> EngineResponse:
        """Send a decode leg. `body` returns its body for a traceparent."""
        with _leg_span("router.decode", instance) as span:
            raw, sent = body(span.traceparent), headers | tracing.headers()
            return await self.legs.decode(instance, path, raw, sent, num_tokens=num_tokens)

    def _instance(self, leg: SentLeg, name: InstanceId) -> Instance:
        """Return the instance that a decision names.

        Raises:
            LegFailed: the instance has left the fleet.
        """
        if name in self.fleet:
            return self.fleet[name]
        raise LegFailed(leg, UNREACHABLE[leg], f"{name} has just left")


def _leg_span(name: str, instance: Instance) -> AbstractContextManager[tracing.Span]:
    return tracing.within(tracing.child(name, kind="client", instance=instance.address.name))


async def stream_response(request: web.Request, response: EngineResponse, record: RequestRecord) -> web.StreamResponse:
    """Send an engine's response to the client as it comes, and close it."""
    try:
        return await _stream_response(request, response, record)
    finally:
        await response.close()


async def _stream_response(request: web.Request, response: EngineResponse, record: RequestRecord) -> web.StreamResponse:
    """Send a response.

    A failure after the first byte ends a stream by an error event, and its connection without a proper end.
    So the client does not mistake half an answer for all of it.
    """
    # A fallback is reported too, with the router's own reason.
    is_remote = record.plan is not None and record.plan.decision.route == "remote"
    status = response.response.status
    record.note_answer(status)
    headers = record.headers() | {"Content-Type": response.response.headers.get("Content-Type", "application/json")}
    if response.is_complete or (is_remote and response.response.content_type == "application/json"):
        whole = b"".join([response.first, *[chunk async for chunk in response.rest()]])
        record.note_chunk(whole)
        if is_remote:
            whole = _take_report(whole, record)
        return web.Response(status=status, headers=headers, body=whole)
    stream = web.StreamResponse(status=status, headers=headers)
    await stream.prepare(request)
    try:
        async with response.instance.watched("stream"):
            await _write_chunk(stream, _take_report(response.first, record) if is_remote else response.first)
            record.note_chunk(response.first)
            async for chunk in response.rest():
                await _write_chunk(stream, _take_report(chunk, record) if is_remote else chunk)
                record.note_chunk(chunk)
        await stream.write_eof()
    except (LegFailed, EngineSilent) as failure:
        record.is_broken = True
        _log.warning("request.stream_aborted", request_id=record.request_id, message=str(failure))
        await _end_broken(request, stream, str(failure))
    except BaseException:
        if request.transport is not None:
            request.transport.abort()  # A reset instead of a proper end.
        raise
    return stream


def _take_report(chunk: bytes, record: RequestRecord) -> bytes:
    """Record the decode engine's report on its transfer, and return the answer without the comment that has it."""
    if RECEIVED_KEY.encode() not in chunk:
        return chunk
    rest, report = take_comment(chunk)
    if report is None:
        with contextlib.suppress(msgspec.DecodeError):
            report = received_report(_ANSWER.decode(chunk).kv_transfer_params)
    if report is not None:
        record.note_transfer(report)
    return rest


async def _write_chunk(stream: web.StreamResponse, chunk: bytes) -> None:
    """Write to the client. A client that has left cancels its request, as the loss of its connection does."""
    try:
        await stream.write(chunk)
    except ConnectionResetError as error:
        raise asyncio.CancelledError from error


async def _end_broken(request: web.Request, stream: web.StreamResponse, message: str) -> None:
    """Tell the client of an event stream that it broke off, and close the connection without a proper end."""
    if stream.content_type == "text/event-stream":
        body = error_body(f"the answer broke off: {message}", kind="engine_lost", code=502)
        with contextlib.suppress(ConnectionResetError):
            await stream.write(b"data: " + body + b"\n\n")
    if request.transport is not None:
        request.transport.close()
