"""Token ids of a prompt, from the engines' own tokenizer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated
from weakref import WeakKeyDictionary

import aiohttp
import msgspec

from prfaas.router.engines.fleet import Instance
from prfaas.router.openai.request import MAX_TOKEN_ID, ParsedRequest

MAX_TOKENISED_BYTES = 8 << 20  # At once at one engine. A tokenizer takes about a hundred times as much memory.
TOKENIZE_SECONDS = 10.0  # 220 KB take 0.1 s. An engine that takes longer does not answer in time for a decision.
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]


class _TokenizeResponse(msgspec.Struct):
    tokens: list[_TokenId]


_DECODER = msgspec.json.Decoder(_TokenizeResponse)


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

    async def token_ids(self, instance: Instance, request: ParsedRequest) -> list[int] | None:
        """Return the prompt's token ids; None if the engine does not provide them, so that it judges the request itself."""
        if request.token_ids is not None:
            return request.token_ids
        body = request.tokenize_body()
        if body is None or len(request.raw) > MAX_TOKENISED_BYTES:
            return None
        gate = self._gates.setdefault(instance, ByteGate(MAX_TOKENISED_BYTES))
        try:
            async with (
                asyncio.timeout(TOKENIZE_SECONDS),
                gate.passing(len(request.raw)),
                self._session.post(f"{instance.url}/tokenize", json=body) as response,
            ):
                return _DECODER.decode(await response.read()).tokens if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError):
            return None
