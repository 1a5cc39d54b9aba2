"""Answers one completion or chat: decides, opens the legs, tries again before the first byte, passes the answer on."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from prfaas import logs, tracing
from prfaas.router.config import PdProtocol
from prfaas.router.engines.fleet import Fleet, Instance
from prfaas.router.engines.legs import UNREACHABLE, EngineResponse, Leg, LegClient, LegFailed
from prfaas.router.openai.request import PATHS, ParsedRequest, nixl_decode_body, nixl_prefill_body
from prfaas.router.openai.tokenizer import TokenizedPrompt, Tokenizer
from prfaas.router.routing.decide import DecisionMaker, RoutePlan, RoutingRequest
from prfaas.router.routing.record import RequestRecord
from prfaas.scheduler.route import EXPLANATIONS
from prfaas.scheduler.snapshot import RequestFacts
from prfaas.types import InstanceId

MAX_TRIES = 4  # decode legs of one request
_log = logs.get("router")


class NoEngineReady(Exception):
    """No engine can answer."""


@dataclass(frozen=True)
class RequestHandler:
    """What an answer needs."""

    fleet: Fleet
    deciding: DecisionMaker
    legs: LegClient
    tokenizer: Tokenizer
    pd_protocol: PdProtocol = "prfaas"

    async def answer(
        self, request: web.Request, parsed: ParsedRequest, record: RequestRecord, *, session: str
    ) -> web.StreamResponse:
        """Return the response, sent.

        Raises:
            NobodyReady: there is no healthy decode instance.
            LegFailed: every one that was tried failed before its first byte.
        """
        ask = await self.ask(parsed, session)
        opened = await self._open(ask, parsed, record)
        try:
            return await stream_response(request, opened, record)
        finally:
            await opened.close()

    async def ask(self, parsed: ParsedRequest, session: str) -> RoutingRequest:
        """What decides the route; the prompt is tokenised only when it could exceed the threshold."""
        facts = RequestFacts(
            parsed.max_prompt_tokens,
            counted=False,
            obstacle=parsed.obstacle() or ("adapter" if not self.fleet.is_base_model(parsed.model) else None),
            turn=parsed.turn,
            max_output_tokens=parsed.max_output_tokens,
            seed=secrets.randbits(32),
        )
        if facts.obstacle is not None or not self.fleet.must_count(facts.num_prompt_tokens):
            return RoutingRequest(facts, parsed.model, session=session, tenant=parsed.tenant)
        prompt = await self._prompt(parsed)
        if prompt is None:
            return RoutingRequest(
                replace(facts, obstacle="not_tokenised"), parsed.model, session=session, tenant=parsed.tenant
            )
        counted = replace(facts, num_prompt_tokens=len(prompt.token_ids), counted=True)
        return RoutingRequest(counted, parsed.model, prompt, session, parsed.tenant)

    async def _prompt(self, parsed: ParsedRequest) -> TokenizedPrompt | None:
        instance = self.fleet.any_decode(parsed.model)
        if instance is None:
            raise NoEngineReady("no engine is ready")
        with tracing.within(tracing.child("router.tokenize", instance=instance.address.name)):
            return await self.tokenizer.prompt(instance, parsed)

    async def _open(self, ask: RoutingRequest, parsed: ParsedRequest, record: RequestRecord) -> EngineResponse:
        """Return the first answer that has its first bytes."""
        plan = await self.deciding.plan(ask)
        while True:
            record.decided(plan)
            try:
                return await self._try(plan, ask, parsed, record)
            except LegFailed as failure:
                record.failed(failure)
                if len(record.failures) >= MAX_TRIES:
                    raise
                ask, plan = await self._next(failure, ask, plan)

    async def _next(self, failure: LegFailed, ask: RoutingRequest, plan: RoutePlan) -> tuple[RoutingRequest, RoutePlan]:
        """What to try after a failure: the same decode instance without a transfer, or another one.

        Raises:
            LegFailed: `failure`, when nothing is left.
        """
        if plan.is_remote and failure.reason not in ("decode_unreachable", "decode_broke_off"):
            return ask, plan.fallen_back()
        assert plan.decision.decode is not None, "it failed, so there was one"
        ask = replace(ask, facts=replace(ask.facts, excluded=ask.facts.excluded | {plan.decision.decode}))
        again = await self.deciding.plan(ask)
        if again.decision.decode is None:
            raise failure
        return ask, again

    async def _try(
        self, plan: RoutePlan, ask: RoutingRequest, parsed: ParsedRequest, record: RequestRecord
    ) -> EngineResponse:
        if plan.decision.decode is None:
            raise NoEngineReady(f"{plan.decision.reason}: {EXPLANATIONS[plan.decision.reason]}")
        decode, path = self._instance("decode", plan.decision.decode), PATHS[parsed.endpoint]
        headers = {"Content-Type": "application/json", "X-Request-Id": record.request_id}
        if not plan.is_remote or plan.decision.prefill is None or ask.prompt is None:
            return await self._one_leg(decode, ask, parsed.local_body(plan.promised_tokens), path, headers)
        prompt, prefill = ask.prompt, self._instance("prefill", plan.decision.prefill)
        if self.pd_protocol == "nixl" and prefill.address.cluster == decode.address.cluster:
            kept = await self._keep(prefill, ask, parsed, headers)
            record.prefilled()
            return await self._one_leg(decode, ask, nixl_decode_body(parsed.raw, kept), path, headers)
        first = asyncio.create_task(self._prefill(prefill, plan, prompt, parsed, headers))
        first.add_done_callback(lambda _: record.prefilled())
        return await self.legs.both(first, asyncio.create_task(self._decode(decode, plan, prompt, parsed, headers)))

    async def _keep(
        self, instance: Instance, ask: RoutingRequest, parsed: ParsedRequest, headers: dict[str, str]
    ) -> dict[str, Any]:
        """What a prefill instance of the decode instance's own cluster says of the KV that it has computed and keeps."""
        path, num_tokens = PATHS[parsed.endpoint], ask.facts.num_prompt_tokens
        with _leg("router.prefill", instance):
            body, headers = nixl_prefill_body(path, parsed.body), headers | tracing.headers()
            return await self.legs.prefill_and_keep(instance, body, headers, path=path, num_tokens=num_tokens)

    async def _one_leg(
        self, instance: Instance, ask: RoutingRequest, body: bytes, path: str, headers: dict[str, str]
    ) -> EngineResponse:
        """Return a decode leg with no prefill leg beside it."""
        with _leg("router.decode", instance):
            num_tokens = ask.facts.num_prompt_tokens
            return await self.legs.decode(instance, path, body, headers | tracing.headers(), num_tokens=num_tokens)

    async def _prefill(
        self,
        instance: Instance,
        plan: RoutePlan,
        prompt: TokenizedPrompt,
        parsed: ParsedRequest,
        headers: dict[str, str],
    ) -> dict[str, Any]:
        with _leg("router.prefill", instance) as leg:
            its, promised_tokens = prompt.token_ids, plan.promised_tokens
            body = parsed.prefill_body(its, plan.grant, promised_tokens=promised_tokens, trace=leg.traceparent)
            return await self.legs.prefill(instance, body, headers | tracing.headers(), num_tokens=len(its))

    async def _decode(
        self,
        instance: Instance,
        plan: RoutePlan,
        prompt: TokenizedPrompt,
        parsed: ParsedRequest,
        headers: dict[str, str],
    ) -> EngineResponse:
        with _leg("router.decode", instance) as leg:
            its, path = prompt.token_ids, PATHS[parsed.endpoint]
            body = parsed.decode_body(its, plan.grant, rendered=prompt.rendered, trace=leg.traceparent)
            return await self.legs.decode(instance, path, body, headers | tracing.headers(), num_tokens=len(its))

    def _instance(self, leg: Leg, name: InstanceId) -> Instance:
        """Return the instance that a decision names.

        Raises:
            LegFailed: it has left the fleet since.
        """
        if name in self.fleet:
            return self.fleet[name]
        raise LegFailed(leg, UNREACHABLE[leg], f"{name} has just left")


def _leg(name: str, instance: Instance) -> AbstractContextManager[tracing.Span]:
    return tracing.within(tracing.child(name, kind="client", instance=instance.address.name))


async def stream_response(request: web.Request, opened: EngineResponse, record: RequestRecord) -> web.StreamResponse:
    """Send the answer as it comes; a failure after its first byte breaks the connection, so that half an answer is
    never taken for a whole one.
    """
    record.answered(opened.response.status)
    status = opened.response.status
    headers = record.headers() | {"Content-Type": opened.response.headers.get("Content-Type", "application/json")}
    if opened.is_whole:
        record.streamed(opened.first)
        return web.Response(status=status, headers=headers, body=opened.first)
    response = web.StreamResponse(status=status, headers=headers)
    await response.prepare(request)
    try:
        await response.write(opened.first)
        record.streamed(opened.first)
        async for chunk in opened.rest():
            await response.write(chunk)
            record.streamed(chunk)
        await response.write_eof()
    except LegFailed as failure:
        _log.warning("request.broke_off", request_id=record.request_id, message=str(failure))
        _abort(request)
    except BaseException:
        _abort(request)
        raise
    return response


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
