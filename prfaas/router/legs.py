"""The legs of a request: one to a decode instance, and for a remote route one to a prefill instance at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from prfaas.router.fleet import Instance

JSON_HEADERS = {"Content-Type": "application/json"}


class LegFailed(Exception):
    """An engine could not be reached, answered with a server error, or broke off; `reason` is a closed word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class OpenAnswer:
    """An engine's answer whose first bytes have come; `close` ends it, also within the engine."""

    instance: Instance
    response: aiohttp.ClientResponse
    first: bytes = b""

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, in the pieces in which it comes.

        Raises:
            LegFailed: the engine broke off.
        """
        yield self.first
        try:
            async for chunk in self.response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise LegFailed("decode_broke_off", repr(error)) from error

    def close(self) -> None:
        self.response.close()
        self.instance.num_requests -= 1


class Legs:
    """Sends requests to engines."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def decode(self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]) -> OpenAnswer:
        """The decode leg, once its first bytes are there; the caller closes it.

        Raises:
            LegFailed: the engine could not be reached, broke off, or answered 500 or more.
        """
        instance.num_requests += 1
        answer: OpenAnswer | None = None
        try:
            response = await self._session.post(f"{instance.url}{path}", data=body, headers=headers)
            answer = OpenAnswer(instance, response)
            answer.first = await response.content.readany()
            if response.status >= 500:
                raise LegFailed("decode_error", f"{response.status}: {answer.first[:500].decode(errors='replace')}")
            return answer
        except BaseException as error:
            if answer is not None:
                answer.close()
            else:
                instance.num_requests -= 1
            raise _translated("decode", instance, error) from error

    async def prefill(self, instance: Instance, body: dict[str, Any], headers: Mapping[str, str]) -> None:
        """The prefill leg: returns when the engine has computed it.

        Raises:
            LegFailed: it has not.
        """
        with instance.busy():
            try:
                url = f"{instance.url}/v1/completions"
                async with self._session.post(url, data=json.dumps(body), headers=headers) as response:
                    text = await response.text()
                    if response.status != 200:
                        raise LegFailed("prefill_error", f"{response.status}: {text[:500]}")
            except (aiohttp.ClientError, OSError) as error:
                raise _translated("prefill", instance, error) from error

    async def tokenize(self, instance: Instance, body: dict[str, Any]) -> list[int]:
        """The prompt as the engine's own tokenizer has it.

        Raises:
            LegFailed: the engine does not say.
        """
        try:
            async with self._session.post(f"{instance.url}/tokenize", json=body) as response:
                if response.status != 200:
                    raise LegFailed("tokenize_error", f"{response.status}: {(await response.text())[:500]}")
                tokens: list[int] = (await response.json())["tokens"]
                return tokens
        except (aiohttp.ClientError, OSError, KeyError) as error:
            raise LegFailed("tokenize_error", repr(error)) from error


def _translated(leg: Literal["prefill", "decode"], instance: Instance, error: BaseException) -> BaseException:
    """What went wrong on a leg, in our words; a refused connection also takes the instance out of the choice."""
    if isinstance(error, aiohttp.ClientConnectorError):
        instance.failed(repr(error))
        return LegFailed(f"{leg}_unreachable", repr(error))
    if isinstance(error, aiohttp.ClientError | OSError):
        return LegFailed(f"{leg}_broke_off", repr(error))
    return error


async def first_answer(prefill: asyncio.Task[None], decode: Coroutine[Any, Any, OpenAnswer]) -> OpenAnswer:
    """The decode leg's answer, unless the prefill leg fails before its first byte.

    Raises:
        LegFailed: either leg failed; the decode leg is closed then.
    """
    opened = asyncio.ensure_future(decode)
    try:
        await asyncio.wait((prefill, opened), return_when=asyncio.FIRST_COMPLETED)
        if prefill.done() and not opened.done():
            prefill.result()
        return await opened
    except BaseException:
        opened.cancel()
        with contextlib.suppress(asyncio.CancelledError, LegFailed):
            (await opened).close()
        raise


async def end(task: asyncio.Task[None]) -> None:
    """Cancel a leg that nobody waits for."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, LegFailed):
        await task
