"""Proxy for paths that need no decision. Paths that change an engine for everybody are refused."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import aiohttp
from aiohttp import web

from prfaas.router.engines.fleet import EngineSilent, Instance
from prfaas.router.engines.legs import NOT_CONNECTED, LegFailed, request_payload
from prfaas.router.openai.request import REFUSED_FIELDS, prepare_forwarded
from prfaas.router.routing.serve import NoEngineReady, abort_connection, write_chunk

# vLLM's paths under /v1 that change an engine for everybody.
_OPERATOR_PATHS: Final = frozenset(("v1/load_lora_adapter", "v1/unload_lora_adapter"))
_SEPARATOR: Final = re.compile(r"[/\\]")


class PathRefused(Exception):
    """Path that clients may not use. The text is for the client."""


def check_path(path: str) -> None:
    """Check that clients may use a path, whose percent signs are decoded.

    Raises:
        PathRefused: the path contains . or .., or changes the engine.
    """
    segments = _SEPARATOR.split(path)
    if any(segment in (".", "..") for segment in segments):
        raise PathRefused(f"{path}: a path must not contain . or ..")
    if "/".join(filter(None, segments)) in _OPERATOR_PATHS:
        raise PathRefused(f"{path}: only for operators, at the engine itself")


@dataclass(frozen=True)
class Proxy:
    """Forwards requests to a decode instance.

    `choose` returns an instance for the model that a request names. `headers` go with the request to the engine.
    `refused` are fields that a JSON body may not contain.
    """

    choose: Callable[[str | None], Instance | None]
    session: aiohttp.ClientSession
    headers: tuple[str, ...] = ("Content-Type", "Accept")
    refused: Sequence[str] = REFUSED_FIELDS

    async def open(
        self, request: web.Request, raw: bytes, *, tenant: str = "", headers: Mapping[str, str] = MappingProxyType({})
    ) -> ForwardedAnswer:
        """Return the answer to a request with the body `raw` after its first bytes. The caller sends it.

        A JSON body gets the tenant's salt. `headers` go with request and response.

        Raises:
            BadRequest: the JSON body contains a field that is refused.
            NoEngineReady: there is no healthy decode instance.
            LegFailed: the engine failed before its first byte.
        """
        body = prepare_forwarded(raw, tenant=tenant, refused=self.refused)
        tried: set[Instance] = set()
        while True:
            instance = self.choose(body.model)
            if instance is None or instance in tried:
                raise NoEngineReady("no engine is ready")
            tried.add(instance)
            try:
                return await self._open(request, instance, body.raw, headers)
            except NOT_CONNECTED as error:  # Nothing was sent, so another instance may take the request.
                instance.failed(repr(error))
            except EngineSilent:  # Another instance can answer, and the silent one is chosen no more.
                pass
            except (aiohttp.ClientError, OSError) as error:
                raise LegFailed("decode", "decode_broke_off", repr(error)) from error

    async def _open(
        self, request: web.Request, instance: Instance, body: bytes, both: Mapping[str, str]
    ) -> ForwardedAnswer:
        headers = {name: request.headers[name] for name in self.headers if name in request.headers} | dict(both)
        url = f"{instance.url}{request.rel_url}"
        sending = self.session.request(
            request.method, url, data=request_payload(body) or None, headers=headers, allow_redirects=False
        )
        async with contextlib.AsyncExitStack() as running:
            running.enter_context(instance.busy())
            async with instance.watched("decode"):
                upstream = await running.enter_async_context(sending)
                first = await upstream.content.readany()
            return ForwardedAnswer(upstream, first, both, running.pop_all())


@dataclass(frozen=True)
class ForwardedAnswer:
    """Answer of an engine whose first bytes have come. `headers` go with it to the client."""

    upstream: aiohttp.ClientResponse
    first: bytes
    headers: Mapping[str, str]
    running: contextlib.AsyncExitStack

    async def send(self, request: web.Request) -> web.StreamResponse:
        """Send the answer to the client as it comes, and close it.

        Raises:
            LegFailed: the engine broke off.
        """
        content_type = self.upstream.headers.get("Content-Type", "application/octet-stream")
        headers = {"Content-Type": content_type, **self.headers}
        response = web.StreamResponse(status=self.upstream.status, headers=headers)
        async with self.running:
            await response.prepare(request)
            try:
                await write_chunk(response, self.first)
                async for chunk in self.upstream.content.iter_any():
                    await write_chunk(response, chunk)
                await response.write_eof()
            except (aiohttp.ClientError, OSError) as error:
                abort_connection(request)
                raise LegFailed("decode", "decode_broke_off", repr(error)) from error
            except BaseException:
                abort_connection(request)
                raise
            return response
