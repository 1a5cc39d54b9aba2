"""Proxy for paths that need no decision. Paths that change an engine for everybody are refused."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from prfaas.router.engines.fleet import Instance
from prfaas.router.engines.legs import EngineResponse, LegClient, LegFailed
from prfaas.router.openai.request import REFUSED_FIELDS, prepare_forwarded
from prfaas.router.routing.record import RequestRecord
from prfaas.router.routing.serve import NoEngineReady

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

    `choose` returns an instance for a request's model and tenant. `headers` of the request go to the engine.
    `refused` are fields that a JSON body may not contain.
    """

    choose: Callable[[str | None, str], Instance | None]
    legs: LegClient
    headers: tuple[str, ...] = ("Content-Type", "Accept")
    refused: Sequence[str] = REFUSED_FIELDS

    async def open(
        self, request: web.Request, raw: bytes, record: RequestRecord, *, tenant: str = ""
    ) -> EngineResponse:
        """Return the response to a request with the body `raw`. A JSON body gets the tenant's salt.

        Raises:
            BadRequest: the JSON body contains a field that is refused.
            NoEngineReady: there is no healthy decode instance.
            LegFailed: the engine failed before its first byte.
        """
        body = prepare_forwarded(raw, tenant=tenant, refused=self.refused)
        headers = {name: request.headers[name] for name in self.headers if name in request.headers} | record.headers()
        tried: set[Instance] = set()
        while True:
            instance = self.choose(body.model, tenant)
            if instance is None or instance in tried:
                raise NoEngineReady("no engine is ready")
            tried.add(instance)
            try:
                path = str(request.rel_url)
                return await self.legs.decode(
                    instance, path, body.raw, headers, method=request.method, is_forwarded=True
                )
            except LegFailed as failure:
                if failure.reason not in ("decode_unreachable", "decode_silent"):
                    raise
