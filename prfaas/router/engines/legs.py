"""Legs of a request: the requests to engines, and the first event of each response.

A stream that fails before its first token is an error of the leg, whatever its HTTP status was.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from prfaas.router.engines.fleet import MAX_TIMER_DELAY_SECONDS, EngineSilent, Instance
from prfaas.transfer_report import SENT_KEY
from prfaas.types import LegReason

SentLeg = Literal["prefill", "decode"]
# Nothing was sent, so another instance may take the request. A host without power gives the second error.
NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_SILENT: dict[SentLeg, LegReason] = {"prefill": "prefill_silent", "decode": "decode_silent"}
UNREACHABLE: dict[SentLeg, LegReason] = {"prefill": "prefill_unreachable", "decode": "decode_unreachable"}
_BROKE_OFF: dict[SentLeg, LegReason] = {"prefill": "prefill_broke_off", "decode": "decode_broke_off"}
COMPLETIONS_PATH = "/v1/completions"
AGENT_LOST = "agent_lost"  # Outcome that blames the prefill instance's own agent.
MAX_WRITE_BYTES = 1 << 20
MAX_HELD_BYTES = 64 << 10  # An error is shorter. A first event with the log probabilities of a prompt has megabytes.
_MESSAGE_BYTES = 500
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_ROLE = b'"delta":{"role":"assistant","content":""}'  # vLLM's first event of a chat, even of a failed one.
_ERROR = b'data: {"error"'  # vLLM's event for a failure after the status. Texts escape quotes.


class _Error(msgspec.Struct):
    code: int


class _ErrorEvent(msgspec.Struct):
    error: _Error


@dataclass(frozen=True)
class EngineError:
    """Error response of an engine. The client gets it if no other instance can answer."""

    status: int
    content_type: str
    body: bytes


class LegFailed(Exception):
    """Leg that failed before its first byte, or broke off after it."""

    def __init__(self, leg: SentLeg, reason: LegReason, message: str, *, answer: EngineError | None = None) -> None:
        super().__init__(message)
        self.leg = leg
        self.reason = reason
        self.answer = answer

    def without_traceback(self) -> LegFailed:
        """Return the error without the frames and causes that keep the request's body and tokens in memory."""
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)


async def read_first_event(response: aiohttp.ClientResponse) -> bytes:
    """Return the first bytes of a response. Those of a stream reach the end of its first event with content or an error."""
    first = await response.content.readany()
    while response.content_type == "text/event-stream" and len(first) < MAX_HELD_BYTES:
        if len(_EVENT_END.findall(first)) > first.count(_ROLE) or response.content.at_eof():
            break
        first += await response.content.readany()
    return first


def streamed_error(first: bytes) -> EngineError | None:
    """Return the server error with which a stream begins, in the form of a plain response; None without one."""
    _, found, rest = first.partition(_ERROR)
    body = _EVENT_END.split((found + rest).removeprefix(b"data: "), maxsplit=1)[0]
    try:
        code = msgspec.json.decode(body, type=_ErrorEvent).error.code if found else 0
    except msgspec.DecodeError:
        return None
    return EngineError(code, "application/json", body) if code >= 500 else None


@dataclass
class EngineResponse:
    """Response of an engine whose first bytes have come. `close` also ends the request within the engines.

    `running` holds what ends with the response. `instance` is the engine. `prefill` is the prefill leg, if any.
    `abandoned` collects prefill legs whose responses nobody awaits.
    """

    response: aiohttp.ClientResponse
    instance: Instance
    first: bytes = b""
    running: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    prefill: asyncio.Task[Any] | None = None
    abandoned: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        """Return whether `first` is the whole response."""
        return self.response.content.at_eof()

    async def rest(self) -> AsyncIterator[bytes]:
        """Yield the chunks after `first` as they come.

        Raises:
            LegFailed: the engine broke off.
        """
        try:
            async for chunk in self.response.content.iter_any():
                self.instance.heard_at = time.monotonic()
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise LegFailed("decode", "decode_broke_off", repr(error)) from error

    async def close(self) -> None:
        is_complete = self.is_complete
        self.running.close()
        if self.prefill is None:
            return
        if is_complete and self.response.status < 400:
            # The prefill leg is about to be answered. Cancelling it would cost its connection.
            self.abandoned.add(self.prefill)
            self.prefill.add_done_callback(self._forget)
        else:
            await _cancel(self.prefill)

    def _forget(self, prefill: asyncio.Task[Any]) -> None:
        self.abandoned.discard(prefill)
        if not prefill.cancelled():
            prefill.exception()


class LegClient:
    """Sends legs to engines. A prefill leg that has not ended after `prefill_seconds` has failed."""

    def __init__(self, session: aiohttp.ClientSession, *, prefill_seconds: float) -> None:
        self._session = session
        self._prefill_seconds = prefill_seconds
        self._abandoned: set[asyncio.Task[Any]] = set()

    async def decode(
        self,
        instance: Instance,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        num_tokens: int = 0,
        method: str = "POST",
        is_forwarded: bool = False,
    ) -> EngineResponse:
        """Send a decode leg or a forwarded request, and return the response after its first bytes. The caller closes it.

        Answers to forwarded requests do not count at the circuit breaker, since they say nothing of completions.

        Raises:
            LegFailed: the engine was unreachable, broke off, or answered with 500 or more, also as a stream's first event.
        """
        started = time.monotonic()
        with contextlib.ExitStack() as running:
            running.enter_context(instance.busy(num_tokens))
            try:
                url = f"{instance.url}{path}"
                async with instance.watched("decode"):
                    response = await self._session.request(
                        method, url, data=request_payload(body) or None, headers=headers, allow_redirects=False
                    )
                    running.callback(response.close)
                    if response.status >= 500:
                        raise await _error_response("decode", response)
                    first = await read_first_event(response)
                if (error_event := streamed_error(first)) is not None:
                    raise _engine_error("decode", error_event)
            except BaseException as error:
                is_late = self._is_late(started)
                raise _translate("decode", instance, error, is_forwarded=is_forwarded, is_late=is_late) from error
            if not is_forwarded:
                instance.breaker.succeeded()
            return EngineResponse(response, instance, first, running.pop_all())

    async def prefill(
        self,
        instance: Instance,
        body: bytes,
        headers: Mapping[str, str],
        *,
        path: str = COMPLETIONS_PATH,
        num_tokens: int = 0,
        is_nixl: bool = False,
    ) -> tuple[dict[str, Any], Any]:
        """Send a prefill leg. Return the `kv_transfer_params` of its response, and all of it, once the engine has computed it.

        Those of a NIXL hand-over let another engine fetch the KV.

        Raises:
            LegFailed: the engine has not computed it, or has no connector that keeps the KV for NIXL.
        """
        started = time.monotonic()
        with instance.busy(num_tokens):
            try:
                url = f"{instance.url}{path}"
                async with (
                    instance.watched("prefill"),
                    asyncio.timeout(self._prefill_seconds),
                    self._session.post(url, data=request_payload(body), headers=headers) as response,
                ):
                    if response.status != 200:
                        raise await _error_response("prefill", response)
                    answer = await response.json()
            except (aiohttp.ClientError, OSError, ValueError, LegFailed, EngineSilent) as error:
                if isinstance(error, TimeoutError) and not isinstance(error, NOT_CONNECTED):
                    message = f"{instance.address.name} has not prefilled within {self._prefill_seconds:g} s"
                    instance.failed_leg("prefill_late")
                    raise LegFailed("prefill", "prefill_late", message) from error
                raise _translate("prefill", instance, error, is_late=self._is_late(started)) from error
        params = _transfer_params(instance, answer)
        if is_nixl and not params:
            message = f"{instance.address.name} answered without kv_transfer_params: it has no connector for hand-overs"
            raise LegFailed("prefill", "prefill_without_transfer", message)
        return params, answer

    def _is_late(self, started: float) -> bool:
        """Return whether a time-out of connecting since `started` is late, because this process itself stood still."""
        return time.monotonic() - started > (self._session.timeout.sock_connect or 0.0) + MAX_TIMER_DELAY_SECONDS

    async def both(self, prefill: asyncio.Task[Any], decode: asyncio.Task[EngineResponse]) -> EngineResponse:
        """Return the response to the decode leg. A leg that fails before the response's first byte ends the other leg.

        A silent prefill engine does not end the decode leg: the decode engine notices that no KV comes, and may already
        compute the prompt.

        Raises:
            LegFailed: one of the legs failed.
        """
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done() and not _is_silent(prefill):
                prefill.result()
            response = await decode
        except BaseException:
            await _cancel(decode)
            if not decode.cancelled() and decode.exception() is None:
                await decode.result().close()
            await _cancel(prefill)
            raise
        response.prefill, response.abandoned = prefill, self._abandoned
        return response


def request_payload(body: bytes) -> bytes | io.BytesIO:
    """Return a body for aiohttp, which warns if it would write more than 1 MiB at once."""
    return io.BytesIO(body) if len(body) > MAX_WRITE_BYTES else body


def _transfer_params(instance: Instance, answer: Any) -> dict[str, Any]:
    """Return the connector's part of a prefill response, and note its success or failure at the circuit breaker.

    Raises:
        LegFailed: the transfer of the KV failed.
    """
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    outcome = params.get(SENT_KEY) if isinstance(params, dict) else None
    if outcome == AGENT_LOST:
        instance.failed_leg("prefill_without_transfer")
    else:  # The instance has computed the prompt. Any other failure may be the receiver's.
        instance.breaker.succeeded()
    if outcome not in (None, "completed"):
        message = f"{instance.address.name} sends nothing: {outcome}"
        raise LegFailed("prefill", "prefill_without_transfer", message)
    return params if isinstance(params, dict) else {}


async def _error_response(leg: SentLeg, response: aiohttp.ClientResponse) -> LegFailed:
    content_type = response.headers.get("Content-Type", "application/json")
    return _engine_error(leg, EngineError(response.status, content_type, await response.read()))


def _engine_error(leg: SentLeg, answer: EngineError) -> LegFailed:
    message = f"{answer.status}: {answer.body[:_MESSAGE_BYTES].decode(errors='replace')}"
    return LegFailed(leg, "prefill_error" if leg == "prefill" else "decode_error", message, answer=answer)


def _translate(
    leg: SentLeg, instance: Instance, error: BaseException, *, is_forwarded: bool = False, is_late: bool
) -> BaseException:
    """Return the error of a leg as `LegFailed`, and note it at the instance.

    A refused connection makes the instance unhealthy, and so does a time-out of connecting unless it is late. Other failures
    count at its circuit breaker, unless the engine rejected the request itself (status below 500), or answered a forwarded one.
    """
    if isinstance(error, EngineSilent):
        return LegFailed(leg, _SILENT[leg], str(error))
    if isinstance(error, NOT_CONNECTED):
        if not (is_late and isinstance(error, TimeoutError)):
            instance.failed(repr(error))
        return LegFailed(leg, UNREACHABLE[leg], repr(error))
    failure = error
    if isinstance(error, aiohttp.ClientError | OSError | ValueError) and not isinstance(error, TimeoutError):
        failure = LegFailed(leg, _BROKE_OFF[leg], repr(error))
    if isinstance(failure, LegFailed):
        is_rejection = failure.answer is not None and (is_forwarded or failure.answer.status < 500)
        if not is_rejection:
            instance.failed_leg(failure.reason)
    return failure


def _is_silent(prefill: asyncio.Task[Any]) -> bool:
    error = prefill.exception()
    return isinstance(error, LegFailed) and error.reason == _SILENT["prefill"]


async def _cancel(leg: asyncio.Task[Any]) -> None:
    """Cancel a leg that nobody waits for. Its error is not raised here, since it would refer to this frame."""
    leg.cancel()
    await asyncio.wait((leg,))
    if not leg.cancelled():
        leg.exception()
