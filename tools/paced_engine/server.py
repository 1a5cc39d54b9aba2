"""OpenAI server of the paced engine: one prefill at a time, with concurrent decode steps."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from prfaas import grants
from prfaas.errors import GrantError
from prfaas.transfer_report import SENT_KEY, ReceivedReport, fallback_report, to_comment
from prfaas.types import TransferId
from tools.paced_engine.kv import answer_tokens, chain_of
from tools.paced_engine.pool import PoolClient

GRANT_KEY = "prfaas_grant"
TRACE_KEY = "prfaas_trace"


@dataclass(frozen=True)
class Pace:
    """Prefill takes `prefill_seconds + prefill_seconds_per_token · l`. `decode_slots` limits concurrent answers."""

    prefill_seconds: float
    prefill_seconds_per_token: float
    token_seconds: float
    decode_slots: int = 1 << 20

    def prefill(self, num_tokens: int) -> float:
        return self.prefill_seconds + self.prefill_seconds_per_token * num_tokens


class Server:
    """Server of one model. `/transfers` counts the results of transfers: sent, right, wrong, nothing."""

    def __init__(self, model: str, pool: PoolClient, pace: Pace, *, journal: Path | None = None) -> None:
        self._model = model
        self._pool = pool
        self._pace = pace
        self._journal_file = journal
        self._prefilling = asyncio.Semaphore()
        self._decoding = asyncio.Semaphore(pace.decode_slots)
        self._num_waiting = 0
        self._num_running = 0
        self._transfers = {"sent": 0, "right": 0, "wrong": 0, "nothing": 0}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/transfers", self._list_transfers)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._model, "object": "model"}]})

    async def _list_transfers(self, request: web.Request) -> web.Response:
        return web.json_response(self._transfers)

    async def _metrics(self, request: web.Request) -> web.Response:
        figures = {
            "num_requests_running": self._num_running - self._num_waiting,
            "num_requests_waiting": self._num_waiting,
        }
        lines = [f"vllm:{name} {value}\n" for name, value in (figures | {"kv_cache_usage_perc": 0}).items()]
        return web.Response(text="".join(lines))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt: list[int] = body["prompt"]
        parameters, salt = body.get("kv_transfer_params") or {}, body.get("cache_salt") or ""
        self._num_running += 1
        try:
            if parameters.get("do_remote_decode"):
                sent = await self._send(prompt, parameters, salt)
                return web.json_response(self._event([0]) | {"kv_transfer_params": {SENT_KEY: sent}})
            is_correct, report = await self._load_prompt(prompt, parameters, salt)
            token_ids = answer_tokens(prompt, int(body.get("max_tokens", 16)), is_kv_correct=is_correct)
            async with self._turn(self._decoding):
                if body.get("stream"):
                    return await self._stream(request, token_ids, report)
                return await self._whole(token_ids, report)
        finally:
            self._num_running -= 1

    async def _load_prompt(
        self, prompt: list[int], parameters: dict[str, Any], salt: str
    ) -> tuple[bool, dict[str, Any]]:
        """Receive or compute the prompt's KV; return whether it is right, and the report on its transfer."""
        if not parameters.get("do_remote_prefill"):
            return True, await self._compute(len(prompt), parameters)
        transfer_id, grant = _grant(parameters)
        chain, trace = chain_of(self._model, prompt[:-1], salt=salt), parameters.get(TRACE_KEY, "")
        local_seconds = self._pace.prefill(len(prompt))
        outcome, is_correct = await self._pool.receive(transfer_id, grant, chain, trace, local_seconds=local_seconds)
        self._journal(transfer_id, "received", outcome)
        if outcome != "completed":
            self._transfers["nothing"] += 1
            await self._prefill(len(prompt))
            return True, ReceivedReport(transfer_id.hex(), outcome).to_params()
        self._transfers["right" if is_correct else "wrong"] += 1
        return is_correct, ReceivedReport(transfer_id.hex(), outcome, chain.num_tokens).to_params()

    async def _compute(self, num_tokens: int, parameters: dict[str, Any]) -> dict[str, Any]:
        """Compute a prompt, and return the report on the transfer that the router has given up for it, if any."""
        fallback = fallback_report(parameters)
        if fallback is not None:
            self._journal(TransferId(bytes.fromhex(fallback.transfer_id)), "fallback", fallback.outcome)
        await self._prefill(num_tokens)
        return fallback.to_params() if fallback else {}

    async def _prefill(self, num_tokens: int) -> None:
        async with self._turn(self._prefilling):
            await asyncio.sleep(self._pace.prefill(num_tokens))

    async def _send(self, prompt: list[int], parameters: dict[str, Any], salt: str) -> str:
        """Compute a prompt and send its KV; return the connector's outcome."""
        transfer_id, grant = _grant(parameters)
        chain, trace = chain_of(self._model, prompt, salt=salt), parameters.get(TRACE_KEY, "")
        transfer = await self._pool.open(transfer_id, grant, chain, trace)
        if transfer is None:
            self._journal(transfer_id, "sent", "agent_lost")
            await self._prefill(len(prompt))
            return "agent_lost"
        outcome = "aborted"
        try:
            async with self._turn(self._prefilling):
                await transfer.compute(self._pace.prefill(len(prompt)))
            self._transfers["sent"] += 1
            outcome = "completed"
            return outcome
        finally:
            transfer.end()
            self._journal(transfer_id, "sent", outcome)

    def _journal(self, transfer_id: TransferId, side: str, outcome: str) -> None:
        """Append the end of a transfer to the journal, which survives a kill of the engine."""
        if self._journal_file is not None:
            entry = {"transfer_id": transfer_id.hex(), "side": side, "outcome": outcome}
            with self._journal_file.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    @contextlib.asynccontextmanager
    async def _turn(self, stage: asyncio.Semaphore) -> AsyncIterator[None]:
        """Wait for a turn at a stage. Waiting requests are counted."""
        self._num_waiting += 1
        try:
            await stage.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            stage.release()

    async def _whole(self, token_ids: list[int], report: dict[str, Any]) -> web.Response:
        await asyncio.sleep(self._pace.token_seconds * len(token_ids))
        return web.json_response(self._event(token_ids) | {"kv_transfer_params": report or None})

    async def _stream(self, request: web.Request, token_ids: list[int], report: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        clock = asyncio.get_running_loop().time
        started = clock()
        for number, token_id in enumerate(token_ids, 1):
            await response.write(f"data: {json.dumps(self._event([token_id]))}\n\n".encode())
            await asyncio.sleep(started + number * self._pace.token_seconds - clock())
        await response.write(to_comment(report).encode() + b"data: [DONE]\n\n")
        return response

    def _event(self, token_ids: list[int]) -> dict[str, Any]:
        choice = {"index": 0, "text": "", "token_ids": token_ids, "finish_reason": None}
        return {"id": "1", "object": "text_completion", "created": 0, "model": self._model, "choices": [choice]}


def _grant(parameters: dict[str, Any]) -> tuple[TransferId, bytes]:
    """Return the transfer id and grant of a request. The agent verifies the grant."""
    try:
        token = grants.from_text(parameters[GRANT_KEY])
        return grants.unverified(token).transfer_id, token
    except (KeyError, GrantError) as error:
        raise web.HTTPBadRequest(text=str(error)) from error
