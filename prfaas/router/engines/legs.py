"""How an engine's answer begins: a stream that failed before it said anything is an error, whatever its status was."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from prfaas.router.engines.fleet import Instance

_EVENT_END = re.compile(rb"\r?\n\r?\n")  # vLLM ends its lines with \n, others of the same protocol with both
_ROLE = b'"delta":{"role":"assistant","content":""}'  # vLLM's first event of a chat, also of one that has failed
_ERROR = b'data: {"error"'  # vLLM's answer where the request failed once its status was sent; texts have their quotes escaped
MAX_HELD_BYTES = 64 << 10  # a fault is shorter; a first event that says what a prompt's tokens weighed is megabytes


class _Error(msgspec.Struct):
    code: int


class _Event(msgspec.Struct):
    error: _Error


async def read_first_event(response: aiohttp.ClientResponse) -> bytes:
    """The first bytes of an answer; of a stream up to the first event that says something, or as many as an error has."""
    first = await response.content.readany()
    while response.content_type == "text/event-stream" and len(first) < MAX_HELD_BYTES:
        if len(_EVENT_END.findall(first)) > first.count(_ROLE) or response.content.at_eof():
            break
        first += await response.content.readany()
    return first


def streamed_error(first: bytes) -> tuple[int, str, bytes] | None:
    """Status, content type and body of the engine's fault with which a stream begins, as a plain answer would have them."""
    _, found, rest = first.partition(_ERROR)
    body = _EVENT_END.split((found + rest).removeprefix(b"data: "), maxsplit=1)[0]
    try:
        code = msgspec.json.decode(body, type=_Event).error.code if found else 0
    except msgspec.DecodeError:
        return None
    return (code, "application/json", body) if code >= 500 else None


Leg = Literal["prefill", "decode"]
LegReason = Literal[
    "prefill_unreachable",
    "prefill_broke_off",
    "prefill_error",
    "prefill_late",
    "prefill_without_transfer",  # computed, but its connector has given the transfer up
    "decode_unreachable",
    "decode_broke_off",
    "decode_error",
]
# Nothing was sent: another instance may have it. The second is what a host that is switched off gives.
NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
UNREACHABLE: dict[Leg, LegReason] = {"prefill": "prefill_unreachable", "decode": "decode_unreachable"}
_BROKE_OFF: dict[Leg, LegReason] = {"prefill": "prefill_broke_off", "decode": "decode_broke_off"}
COMPLETIONS_PATH = "/v1/completions"
SENT_KEY = "prfaas_sent"  # in a prefill leg's answer: how its transfer stands, "completed" when all of it is on its way
AGENT_LOST = "agent_lost"  # so where the prefill instance's own agent is away
AT_ONCE_BYTES = 1 << 20
_MESSAGE_BYTES = 500  # of an engine's error text that go into ours


@dataclass(frozen=True)
class EngineError:
    """An engine's own error answer, for a client that nobody else can serve."""

    status: int
    content_type: str
    body: bytes


class LegFailed(Exception):
    """A leg failed before its first byte, or broke off after it."""

    def __init__(self, leg: Leg, reason: LegReason, message: str, *, answer: EngineError | None = None) -> None:
        super().__init__(message)
        self.leg = leg
        self.reason = reason
        self.answer = answer


@dataclass
class EngineResponse:
    """An engine's answer whose first bytes have come; `close` ends it, also within the engines."""

    response: aiohttp.ClientResponse
    first: bytes = b""
    under_way: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # what ends with it
    prefilling: asyncio.Task[Any] | None = None
    left: set[asyncio.Task[Any]] = field(default_factory=set)  # prefill legs whose answers nobody waits for

    @property
    def is_whole(self) -> bool:
        """Return whether `first` is all of it."""
        return self.response.content.at_eof()

    async def rest(self) -> AsyncIterator[bytes]:
        """What follows `first`, in the pieces in which it comes.

        Raises:
            LegFailed: the engine broke off.
        """
        try:
            async for chunk in self.response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise LegFailed("decode", "decode_broke_off", repr(error)) from error

    async def close(self) -> None:
        is_whole = self.is_whole
        self.under_way.close()
        if self.prefilling is None:
            return
        if is_whole and self.response.status < 400:  # its own answer is about to come: to cancel costs a connection
            self.left.add(self.prefilling)
            self.prefilling.add_done_callback(self._forget)
        else:
            await end(self.prefilling)

    def _forget(self, prefilling: asyncio.Task[Any]) -> None:
        self.left.discard(prefilling)
        if not prefilling.cancelled():
            prefilling.exception()


class LegClient:
    """Sends requests to engines. `prefill_seconds`: when a prefill leg that has not ended has failed."""

    def __init__(self, session: aiohttp.ClientSession, *, prefill_seconds: float) -> None:
        self._session = session
        self._prefill_seconds = prefill_seconds
        self._left: set[asyncio.Task[Any]] = set()

    async def decode(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str], *, num_tokens: int = 0
    ) -> EngineResponse:
        """Return the decode leg, once its first bytes are there; the caller closes it.

        Raises:
            LegFailed: the engine could not be reached, broke off, or answered 500 or more, be it in a stream's beginning.
        """
        with contextlib.ExitStack() as under_way:
            under_way.enter_context(instance.busy(num_tokens))
            try:
                response = await self._session.post(
                    f"{instance.url}{path}", data=request_payload(body), headers=headers
                )
                under_way.callback(response.close)
                if response.status >= 500:
                    raise await _engine_error("decode", response)
                first = await read_first_event(response)
                if (failed := streamed_error(first)) is not None:
                    raise _leg_failed("decode", EngineError(*failed))
            except BaseException as error:
                raise _translated("decode", instance, error) from error
            instance.breaker.succeeded()
            return EngineResponse(response, first, under_way.pop_all())

    async def prefill(
        self,
        instance: Instance,
        body: bytes,
        headers: Mapping[str, str],
        *,
        path: str = COMPLETIONS_PATH,
        num_tokens: int = 0,
    ) -> dict[str, Any]:
        """Return the prefill leg: the `kv_transfer_params` of its answer, once the engine has computed it.

        Raises:
            LegFailed: it has not.
        """
        with instance.busy(num_tokens):
            try:
                async with asyncio.timeout(self._prefill_seconds):
                    async with self._session.post(
                        f"{instance.url}{path}", data=request_payload(body), headers=headers
                    ) as response:
                        if response.status != 200:
                            raise await _engine_error("prefill", response)
                        answer = await response.json()
            except NOT_CONNECTED as error:
                raise _translated("prefill", instance, error) from error
            except TimeoutError as error:
                message = f"{instance.address.name} has not prefilled within {self._prefill_seconds:g} s"
                instance.failed_leg("prefill_late")
                raise LegFailed("prefill", "prefill_late", message) from error
            except (aiohttp.ClientError, OSError, ValueError, LegFailed) as error:
                raise _translated("prefill", instance, error) from error
            return _params(instance, answer)

    async def prefill_and_keep(
        self, instance: Instance, body: bytes, headers: Mapping[str, str], *, path: str, num_tokens: int = 0
    ) -> dict[str, Any]:
        """Return the prefill leg of a hand-over in two steps: what the engine says of the KV that it keeps for another one.

        Raises:
            LegFailed: it has not computed it, or keeps nothing.
        """
        kept = await self.prefill(instance, body, headers, path=path, num_tokens=num_tokens)
        if not kept:
            message = f"{instance.address.name} answered without kv_transfer_params: no connector hands over there"
            raise LegFailed("prefill", "prefill_without_transfer", message)
        return kept

    async def both(self, prefill: asyncio.Task[Any], decode: asyncio.Task[EngineResponse]) -> EngineResponse:
        """Return the decode leg's answer, unless the prefill leg fails before its first byte; whoever fails ends the other.

        Raises:
            LegFailed: one of them failed.
        """
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done():
                prefill.result()
            answer = await decode
        except BaseException:
            await _close_when_open(decode)
            await end(prefill)
            raise
        answer.prefilling, answer.left = prefill, self._left
        return answer


def request_payload(body: bytes) -> bytes | io.BytesIO:
    """Return a body as aiohttp takes it: beyond a mebibyte it warns of what would be written in one go."""
    return io.BytesIO(body) if len(body) > AT_ONCE_BYTES else body


def _params(instance: Instance, answer: Any) -> dict[str, Any]:
    """The connector's part of a prefill answer, which closes or opens the instance's breaker; LegFailed when it says that
    no KV is on its way.
    """
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    sent = params.get(SENT_KEY) if isinstance(params, dict) else None
    if sent == AGENT_LOST:
        instance.failed_leg("prefill_without_transfer")
    else:  # it has computed; whatever else ended the transfer may lie with the receiver
        instance.breaker.succeeded()
    if sent not in (None, "completed"):
        message = f"{instance.address.name} sends nothing: {sent}"
        raise LegFailed("prefill", "prefill_without_transfer", message)
    return params if isinstance(params, dict) else {}


async def _engine_error(leg: Leg, response: aiohttp.ClientResponse) -> LegFailed:
    content_type = response.headers.get("Content-Type", "application/json")
    return _leg_failed(leg, EngineError(response.status, content_type, await response.read()))


def _leg_failed(leg: Leg, answer: EngineError) -> LegFailed:
    message = f"{answer.status}: {answer.body[:_MESSAGE_BYTES].decode(errors='replace')}"
    return LegFailed(leg, "prefill_error" if leg == "prefill" else "decode_error", message, answer=answer)


def _translated(leg: Leg, instance: Instance, error: BaseException) -> BaseException:
    """What went wrong on a leg, in our words; a refused connection also takes the instance out of the choice, and other
    failures do when they come on end.
    """
    if isinstance(error, NOT_CONNECTED):
        instance.failed(repr(error))
        return LegFailed(leg, UNREACHABLE[leg], repr(error))
    failure = error
    if isinstance(error, aiohttp.ClientError | OSError | ValueError) and not isinstance(error, TimeoutError):
        failure = LegFailed(leg, _BROKE_OFF[leg], repr(error))
    if isinstance(failure, LegFailed) and not _is_the_requests_own(failure):
        instance.failed_leg(failure.reason)
    return failure


def _is_the_requests_own(failure: LegFailed) -> bool:
    """Return whether an engine has judged the request rather than failed."""
    return failure.answer is not None and failure.answer.status < 500


async def _close_when_open(decode: asyncio.Task[EngineResponse]) -> None:
    """Cancel a decode leg; close its answer when it came all the same."""
    decode.cancel()
    with contextlib.suppress(asyncio.CancelledError, LegFailed):
        await (await decode).close()


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a leg that nobody waits for."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, LegFailed):
        await task
