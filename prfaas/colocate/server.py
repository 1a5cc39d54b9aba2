"""The executor's HTTP surface: /v1/completions (greedy, streaming), /v1/models, /tokenize, /healthz, /status, /metrics."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import dataclasses
import json
import os
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from prfaas import logs, metrics
from prfaas.colocate.config import ColocateConfig
from prfaas.colocate.model.cache import CacheShape, num_bytes
from prfaas.colocate.model.shape import SHAPES
from prfaas.colocate.pool import PoolSettings
from prfaas.colocate.processes.messages import NO_STOP_TOKEN
from prfaas.colocate.processes.supervisor import ExecutorFailed, ExecutorSettings, Generation, Supervisor
from prfaas.errors import ConfigError
from prfaas.model.cost.colocation import ShareTable
from prfaas.solve.files.profile_file import read_colocation
from prfaas.transfer_report import to_comment
from prfaas.transport.net.tls_proxy import INNER, TlsProxy, tls_proxy_for
from prfaas.units import split_address

log = logs.get("colocate.server")

Outcome = Literal["complete", "cancelled", "failed"]
DEFAULT_MAX_TOKENS = 16  # Default of the OpenAI API.
NOT_TAKEN = ("stop", "logprobs", "echo", "suffix")  # Options of the OpenAI API that would change the answer.
NUM_BYTE_TOKENS = 256  # Byte tokenizer: a token below this is a byte of UTF-8.


@dataclass(frozen=True)
class Completion:
    """A request that was checked."""

    prompt: tuple[int, ...]
    max_tokens: int
    stop_token: int | None
    stream: bool
    wants_usage: bool  # Usage at the end of a stream.
    parameters: dict[str, Any]  # Transfer parameters from the router.
    salt: str = ""
    model: str = ""  # Any name is accepted.


def executor_settings(config: ColocateConfig) -> ExecutorSettings:
    """Return the executor settings.

    Raises:
        ConfigError: this machine or the named profile does not have it; it names the key.
    """
    if config.partition == "affinity" and config.profile is None:
        raise ConfigError(f"partition: shares of {config.partition} follow a profile; name it, or leave both out")
    table = _shares(config.profile) if config.profile else None
    cache = CacheShape(config.num_blocks, config.block_tokens, config.max_requests + 1)
    _refuse_what_does_not_fit(config, cache)
    return ExecutorSettings(
        shape=config.shape,
        cache=cache,
        max_rows=config.max_rows,
        max_tokens=config.max_tokens,
        seed=config.seed,
        dtype=config.dtype,
        partition=config.partition,
        profile=table,
        itl_slo_seconds=config.itl_slo_seconds,
        dwell_steps=config.dwell_steps,
        num_threads=config.num_threads,
        pool=_pool_settings(config),
    )


def _shares(profile: Path) -> ShareTable:
    try:
        return read_colocation(profile).decode
    except ConfigError as error:
        raise ConfigError(f"profile: {error}") from error


def _refuse_what_does_not_fit(config: ColocateConfig, cache: CacheShape) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = num_bytes(SHAPES[config.shape], cache, config.dtype)
    if needed > memory:
        asked = f"{config.num_blocks} blocks of {config.block_tokens} tokens and {config.max_requests} requests"
        raise ConfigError(f"num_blocks, max_requests: {asked} take {needed} bytes, this machine has {memory}")


def _pool_settings(config: ColocateConfig) -> PoolSettings | None:
    if config.agent_socket is None:
        return None
    return PoolSettings(
        socket=config.agent_socket,
        instance=f"colocate-{uuid.uuid4().hex}",
        model=config.served_model_name,
        weights=f"{config.shape} {config.dtype} seed {config.seed}",
        tenant=config.tenant,
        reuse_min_tokens=config.reuse_min_tokens,
        silence_seconds=config.silence_seconds,
    )


def parse_completion(body: Any) -> Completion:
    """Raises ValueError saying what of the body we cannot do."""
    if not isinstance(body, dict):
        raise ValueError("the body is a JSON object")
    prompt = body.get("prompt")
    tokens = encode(prompt) if isinstance(prompt, str) else prompt
    if not isinstance(tokens, list) or not all(_is_number(token) for token in tokens):
        raise ValueError("prompt: one text or one list of token ids")
    if body.get("temperature", 0) or body.get("n", 1) != 1:
        raise ValueError("this executor answers greedily, once: temperature 0, n 1")
    if ignored := [name for name in NOT_TAKEN if body.get(name)]:
        raise ValueError(f"{ignored[0]}: this executor does not have it")
    max_tokens = body.get("max_tokens", DEFAULT_MAX_TOKENS)
    stops = body.get("stop_token_ids") or []
    if not _is_number(max_tokens) or not isinstance(stops, list) or len(stops) > 1:
        raise ValueError("max_tokens: a number; stop_token_ids: a list")
    if not all(_is_number(token) and 0 <= token < NO_STOP_TOKEN for token in stops):
        raise ValueError(f"stop_token_ids: at most one token id, from 0 and below {NO_STOP_TOKEN}")
    parameters, options = body.get("kv_transfer_params") or {}, body.get("stream_options") or {}
    if not isinstance(parameters, dict) or not isinstance(options, dict):
        raise ValueError("kv_transfer_params, stream_options: objects")
    stop, wants_usage, salt = stops[0] if stops else None, bool(options.get("include_usage")), body.get("cache_salt")
    if not isinstance(salt, str | None):
        raise ValueError("cache_salt: a text")
    stream, model = body.get("stream"), body.get("model")
    if not isinstance(stream, bool | None) or not isinstance(model, str | None):
        raise ValueError("stream: true or false; model: a text")
    return Completion(
        tuple(tokens), max_tokens, stop, bool(stream), wants_usage, parameters, salt=salt or "", model=model or ""
    )


def _is_number(value: object) -> bool:
    """Return a whole one; JSON's true is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def encode(text: str) -> list[int]:
    return list(text.encode())


class Application:
    """The routes over one executor."""

    def __init__(self, config: ColocateConfig, executor: Supervisor) -> None:
        self._config, self._executor = config, executor

    def routes(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/health", self._healthz)  # vLLM's name, which routers use.
        app.router.add_get("/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        try:
            completion = parse_completion(json.loads(await request.read()))
            if completion.model not in ("", served := self._config.served_model_name):
                metrics.COLOCATE_REQUESTS.labels("refused").inc()
                return _error(404, f"the model {completion.model!r} does not exist; this executor serves {served!r}")
            self._executor.check(completion.prompt, completion.max_tokens)
        except (ValueError, web.RequestPayloadError) as error:
            metrics.COLOCATE_REQUESTS.labels("refused").inc()
            return _refusal(error, str(error))
        except ExecutorFailed as error:
            return _error(503, str(error))
        outcome: Outcome = "cancelled"
        try:
            response, outcome = await (self._stream if completion.stream else self._whole)(request, completion)
        finally:
            metrics.COLOCATE_REQUESTS.labels(outcome).inc()
        return response

    def _tokens(self, completion: Completion, generation: Generation) -> AsyncGenerator[int, None]:
        return self._executor.generate(
            completion.prompt,
            completion.max_tokens,
            stop_token=completion.stop_token,
            parameters=completion.parameters,
            salt=completion.salt,
            generation=generation,
        )

    async def _whole(self, request: web.Request, completion: Completion) -> tuple[web.StreamResponse, Outcome]:
        generation = Generation()
        try:
            tokens = [token async for token in self._tokens(completion, generation)]
        except ExecutorFailed as error:
            return _error(503, str(error)), "failed"
        answer = self._chunk(_id(), Text().add(tokens), tokens, completion)
        if generation.params is not None:
            answer["kv_transfer_params"] = generation.params
        return web.json_response(answer | _usage(completion, tokens, generation)), "complete"

    async def _stream(self, request: web.Request, completion: Completion) -> tuple[web.StreamResponse, Outcome]:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        number, text, generation = _id(), Text(), Generation()
        tokens: list[int] = []
        outcome: Outcome = "complete"
        try:
            async with contextlib.aclosing(self._tokens(completion, generation)) as answer:
                async for token in answer:
                    tokens.append(token)
                    chunk = self._chunk(number, text.add([token]), [token], completion, num_tokens=len(tokens))
                    await response.write(_event(chunk))
            if completion.wants_usage:
                usage = self._chunk(number, "", [], completion) | {"choices": []}
                await response.write(_event(usage | _usage(completion, tokens, generation)))
        except ExecutorFailed as error:
            outcome = "failed"
            await response.write(_event({"error": {"message": str(error), "type": "server_error"}}))
        await response.write(to_comment(generation.params or {}).encode() + b"data: [DONE]\n\n")
        return response, outcome

    def _chunk(
        self, number: str, text: str, tokens: list[int], completion: Completion, *, num_tokens: int | None = None
    ) -> dict[str, Any]:
        stopped = bool(tokens) and tokens[-1] == completion.stop_token
        ended = stopped or (len(tokens) if num_tokens is None else num_tokens) >= completion.max_tokens
        reason = ("stop" if stopped else "length") if ended else None
        choice = {"index": 0, "text": text, "token_ids": tokens, "logprobs": None, "finish_reason": reason}
        return {
            "id": number,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._config.served_model_name,
            "choices": [choice],
        }

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())  # JSON is UTF-8, whatever charset a header names (RFC 8259 8.1)
            tokens = encode(body["prompt"])
        except (ValueError, KeyError, TypeError, AttributeError, web.RequestPayloadError) as error:
            return _refusal(error, "prompt: a text")
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self._config.max_tokens})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._config.served_model_name, "object": "model", "max_model_len": self._config.max_tokens}
        return web.json_response({"object": "list", "data": [model]})

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._executor.is_alive else 503)

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self._executor.status())

    async def _metrics(self, request: web.Request) -> web.Response:
        body = generate_latest() + self._load_lines().encode()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _load_lines(self) -> str:
        """Return the load under the metric names of vLLM, which agents and gateways read."""
        status = self._executor.status()
        live, running = int(str(status["live_requests"])), int(str(status["running"]))
        usage = 1 - int(str(status["free_blocks"])) / (self._config.num_blocks - 1)
        figures = {"num_requests_running": running, "num_requests_waiting": max(0, live - running)}
        return "".join(f"vllm:{name} {value}\n" for name, value in (figures | {"kv_cache_usage_perc": usage}).items())


class Text:
    """Tokens as text, a piece at a time; a character that is cut between tokens comes with its last byte."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: list[int]) -> str:
        pieces = []
        for token in tokens:
            is_byte = token < NUM_BYTE_TOKENS
            pieces.append(self._decoder.decode(bytes([token]) if is_byte else b"", final=not is_byte))
            if not is_byte:
                pieces.append(f"<{token}>")
        return "".join(pieces)


async def serve(config: ColocateConfig, *, bound: asyncio.Future[str] | None = None) -> None:
    """Serve until cancelled; `bound` is told the address, which matters when the port is 0."""
    door = tls_proxy_for(
        config.listen,
        config.certificates(),
        setting="listen",
        allows_plaintext=config.insecure_plaintext,
        refused=lambda reason: metrics.COLOCATE_TLS_REFUSALS.labels(reason=reason).inc(),
    )
    try:
        async with Supervisor(executor_settings(config)) as executor:
            await _serve(config, executor, door, bound)
    finally:
        if door is not None:
            await door.close()


async def _serve(
    config: ColocateConfig, executor: Supervisor, door: TlsProxy | None, bound: asyncio.Future[str] | None
) -> None:
    host, port = split_address(INNER if door else config.listen)
    runner = web.AppRunner(
        Application(config, executor).routes(), handler_cancellation=True
    )  # Connections of clients that left.
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        address = f"{host}:{runner.addresses[0][1]}"
        if door is not None:
            door.start(address)
            address = door.address
        log.info("serving", address=address, **dataclasses.asdict(config))
        if bound is not None:
            bound.set_result(address)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _id() -> str:
    return f"cmpl-{uuid.uuid4().hex}"


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def _usage(completion: Completion, tokens: list[int], generation: Generation) -> dict[str, Any]:
    prompt, answer = len(completion.prompt), len(tokens)
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    return {"usage": usage | {"prompt_tokens_details": {"cached_tokens": generation.num_cached}}}


def _refusal(error: Exception, message: str) -> web.Response:
    """400; behind a body that cannot be read no other request is found, so that connection ends, and says so."""
    answer = _error(400, message)
    if isinstance(error, web.RequestPayloadError):
        answer.force_close()
    return answer


def _error(status: int, message: str) -> web.Response:
    """As the OpenAI API has it; 404 is about the model."""
    kind, code = ("invalid_request_error" if status < 500 else "server_error"), None
    if status == 404:
        code = "model_not_found"
    return web.json_response({"error": {"message": message, "type": kind, "code": code}}, status=status)
