"""Token ids of a prompt, from the engines' own tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated
from weakref import WeakKeyDictionary

import aiohttp
import msgspec

from prfaas.router.engines.fleet import Instance
from prfaas.router.engines.legs import request_payload
from prfaas.router.openai.request import MAX_TOKEN_ID, PATHS, ParsedRequest

MAX_TOKENISED_BYTES = 8 << 20  # At once at one engine. A tokenizer takes about a hundred times as much memory.
TOKENIZE_SECONDS = 10.0  # 220 KB take 0.1 s. An engine that takes longer does not answer in time for a decision.
_RENDER_ABSENT = (403, 404, 405, 501)  # Status of engines without --enable-scale-out, and of other engines than vLLM.
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]


@dataclass(frozen=True)
class TokenizedPrompt:
    """Token ids of a prompt. `rendered`: they are the engine's own rendering of this very request."""

    token_ids: list[int]
    rendered: bool = False


class _RenderResponse(msgspec.Struct):
    token_ids: list[_TokenId]


class _TokenizeResponse(msgspec.Struct):
    tokens: list[_TokenId]


_RENDER_DECODER, _TOKENIZE_DECODER = msgspec.json.Decoder(_RenderResponse), msgspec.json.Decoder(_TokenizeResponse)


class ByteGate:
    """Lets requests through while their bytes together are at most a limit. A single larger one never passes."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def passing(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait for room, and take it while the block runs."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._left >= num_bytes)
            self._left -= num_bytes
        try:
            yield
        finally:
            self._left += num_bytes
            async with self._changed:
                self._changed.notify_all()


class Tokenizer:
    """Asks engines for token ids, of a bounded number of bytes at once."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._gates: WeakKeyDictionary[Instance, ByteGate] = WeakKeyDictionary()

    async def prompt(self, instance: Instance, request: ParsedRequest) -> TokenizedPrompt | None:
        """Return the prompt's token ids; None if the engine does not provide them, so that it judges the request itself."""
        if request.token_ids is not None:
            return TokenizedPrompt(request.token_ids)
        if len(request.raw) > MAX_TOKENISED_BYTES:
            return None
        gate = self._gates.setdefault(instance, ByteGate(MAX_TOKENISED_BYTES))
        try:
            async with asyncio.timeout(TOKENIZE_SECONDS), gate.passing(len(request.raw)):
                return await self._ask(instance, request)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError):
            return None

    async def _ask(self, instance: Instance, request: ParsedRequest) -> TokenizedPrompt | None:
        if request.endpoint == "chat" and instance.renders:
            rendered = await self._render(instance, request)
            if rendered is not None or instance.renders:
                return rendered
        body = request.tokenize_body()
        if body is None:
            return None
        async with self._session.post(f"{instance.url}/tokenize", json=body) as response:
            return (
                TokenizedPrompt(_TOKENIZE_DECODER.decode(await response.read()).tokens)
                if response.status == 200
                else None
            )

    async def _render(self, instance: Instance, request: ParsedRequest) -> TokenizedPrompt | None:
        url = f"{instance.url}{PATHS['chat']}/render"
        headers = {"Content-Type": "application/json"}
        async with self._session.post(url, data=request_payload(request.raw), headers=headers) as response:
            if response.status in _RENDER_ABSENT:
                instance.renders = False
            if response.status != 200:
                return None
            return TokenizedPrompt(_RENDER_DECODER.decode(await response.read()).token_ids, rendered=True)
