"""A prompt as token ids, from the engines' own tokenizer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

import aiohttp
import msgspec

from prfaas.router.fleet import Instance
from prfaas.router.legs import in_pieces
from prfaas.router.openai import MAX_TOKEN_ID, PATHS, ParsedRequest

TOKENIZE_SECONDS = 10.0  # 220 KB take 0.1 s; beyond this the engine is not going to answer in time for a decision
_RENDER_ABSENT = (403, 404, 405, 501)  # an engine without --enable-scale-out, or one that is no vLLM
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]


@dataclass(frozen=True)
class Prompt:
    """Token ids; `rendered` when they are the engine's own rendering of this very request."""

    token_ids: list[int]
    rendered: bool = False


class _Rendered(msgspec.Struct):
    token_ids: list[_TokenId]


class _Tokenized(msgspec.Struct):
    tokens: list[_TokenId]


_RENDERED, _TOKENIZED = msgspec.json.Decoder(_Rendered), msgspec.json.Decoder(_Tokenized)


class Tokenizer:
    """Asks engines for token ids."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def prompt(self, instance: Instance, request: ParsedRequest) -> Prompt | None:
        """The prompt's token ids; None when the engine does not say, so that it judges the request itself."""
        if request.token_ids is not None:
            return Prompt(request.token_ids)
        try:
            async with asyncio.timeout(TOKENIZE_SECONDS):
                if request.endpoint == "chat" and instance.renders:
                    rendered = await self._render(instance, request)
                    if rendered is not None or instance.renders:
                        return rendered
                return await self._tokenize(instance, request)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return None

    async def _render(self, instance: Instance, request: ParsedRequest) -> Prompt | None:
        url = f"{instance.url}{PATHS['chat']}/render"
        headers = {"Content-Type": "application/json"}
        async with self._session.post(url, data=in_pieces(request.raw), headers=headers) as response:
            if response.status in _RENDER_ABSENT:
                instance.renders = False
            if response.status != 200:
                return None
            return Prompt(_RENDERED.decode(await response.read()).token_ids, rendered=True)

    async def _tokenize(self, instance: Instance, request: ParsedRequest) -> Prompt | None:
        body = request.tokenize_body()
        if body is None:
            return None
        async with self._session.post(f"{instance.url}/tokenize", json=body) as response:
            return Prompt(_TOKENIZED.decode(await response.read()).tokens) if response.status == 200 else None
