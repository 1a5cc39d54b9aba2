"""Which of an engine's paths a client reaches through a door: those for its own requests, not those that change the engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import aiohttp
from aiohttp import web

from prfaas.router.engines.fleet import Instance
from prfaas.router.engines.legs import NOT_CONNECTED, LegFailed, request_payload
from prfaas.router.openai.request import REFUSED_FIELDS, prepare_forwarded
from prfaas.router.routing.serve import NoEngineReady

# vLLM's paths under /v1 that change an engine for everybody.
_OPERATORS: Final = frozenset(("v1/load_lora_adapter", "v1/unload_lora_adapter"))
_SEPARATOR: Final = re.compile(r"[/\\]")


class PathRefused(Exception):
    """A path that clients may not ask for; the text is for the client."""


def check_path(path: str) -> None:
    """Return when clients may ask for this path, whose percent signs are decoded.

    Raises:
        PathRefused: a segment leads out of where it stands, or the path changes the engine.
    """
    segments = _SEPARATOR.split(path)
    if any(segment in (".", "..") for segment in segments):
        raise PathRefused(f"{path}: a path has no . or .. in it")
    if "/".join(filter(None, segments)) in _OPERATORS:
        raise PathRefused(f"{path}: for operators, at the engine itself")


@dataclass(frozen=True)
class Proxy:
    """What passing on needs."""

    choose: Callable[[str | None], Instance | None]  # by the model that the request names
    session: aiohttp.ClientSession
    headers: tuple[str, ...] = ("Content-Type", "Accept")  # that go with the request
    refused: Sequence[str] = REFUSED_FIELDS  # that its JSON may not carry

    async def pass_on(
        self, request: web.Request, *, tenant: str = "", headers: Mapping[str, str] = MappingProxyType({})
    ) -> web.StreamResponse:
        """Return the response, sent; JSON is salted for the client's tenant, if it has one. `headers` go with both.

        Raises:
            BadRequest: its JSON carries a field that is `refused`.
            NobodyReady: there is no healthy decode instance.
            LegFailed: the engine broke off before its first byte.
        """
        body = prepare_forwarded(await request.read(), tenant=tenant, refused=self.refused)
        tried: set[Instance] = set()
        while True:
            instance = self.choose(body.model)
            if instance is None or instance in tried:
                raise NoEngineReady("no engine is ready")
            tried.add(instance)
            try:
                return await self._send(request, instance, body.raw, headers)
            except NOT_CONNECTED as error:
                instance.failed(repr(error))  # nothing was sent: the next one may have it
            except (aiohttp.ClientError, OSError) as error:
                raise LegFailed("decode", "decode_broke_off", repr(error)) from error

    async def _send(
        self, request: web.Request, instance: Instance, body: bytes, both: Mapping[str, str]
    ) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in self.headers if name in request.headers} | dict(both)
        url = f"{instance.url}{request.rel_url}"
        with instance.busy():
            sending = self.session.request(
                request.method, url, data=request_payload(body) or None, headers=headers, allow_redirects=False
            )
            async with sending as upstream:
                content_type = upstream.headers.get("Content-Type", "application/octet-stream")
                first = await upstream.content.readany()
                response = web.StreamResponse(status=upstream.status, headers={"Content-Type": content_type, **both})
                await response.prepare(request)
                try:
                    await response.write(first)
                    async for chunk in upstream.content.iter_any():
                        await response.write(chunk)
                    await response.write_eof()
                except BaseException:
                    if request.transport is not None:
                        request.transport.abort()  # the client must not take half an answer for a whole one
                    raise
                return response
