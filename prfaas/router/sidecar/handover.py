"""One request over two engines: the prefill leg, then or at the same time the decode leg, and what follows a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prfaas import logs, metrics
from prfaas.router.engines.fleet import Instance
from prfaas.router.engines.legs import EngineResponse, LegClient, LegFailed
from prfaas.router.openai.request import PATHS, ParsedRequest, nixl_decode_body, nixl_prefill_body
from prfaas.router.openai.tokenizer import Tokenizer
from prfaas.router.sidecar.config import SidecarConfig

_RETRIED = (502, 503, 504)
_ENDPOINTS = {path: endpoint for endpoint, path in PATHS.items()}
_log = logs.get("sidecar")


@dataclass(frozen=True)
class SidecarRequest:
    """A client's request: its path, its bytes and what they say, the headers of both legs, the gateway's grant."""

    path: str
    raw: bytes
    body: dict[str, Any]
    headers: Mapping[str, str]
    grant: str = ""


@dataclass(frozen=True)
class Handover:
    """Opens answers of the decode engine, prefilled elsewhere."""

    config: SidecarConfig
    engine: Instance
    legs: LegClient
    tokenizer: Tokenizer

    async def open(self, asked: SidecarRequest, prefill: Instance) -> EngineResponse:
        """Return the decode engine's answer, once its first bytes are there.

        Raises:
            LegFailed: an engine failed, and no other way was left.
        """
        try:
            answer = await (self._at_once if self.config.protocol == "prfaas" else self._in_turn)(asked, prefill)
        except LegFailed as failure:
            if self.config.prefill_failure == "fail" or failure.reason == "decode_unreachable":
                metrics.SIDECAR_REQUESTS.labels(outcome="failed").inc()
                raise
            _log.warning("prefill.failed", prefill=prefill.address.name, reason=failure.reason, message=str(failure))
            metrics.SIDECAR_REQUESTS.labels(outcome="fell_back").inc()
            return await self.local(asked)
        metrics.SIDECAR_REQUESTS.labels(outcome="disaggregated").inc()
        return answer

    async def local(self, asked: SidecarRequest) -> EngineResponse:
        """Return the decode engine alone."""
        return await self.legs.decode(self.engine, asked.path, asked.raw, asked.headers)

    async def _in_turn(self, asked: SidecarRequest, prefill: Instance) -> EngineResponse:
        kept = await self._prefilled(asked, prefill)
        return await self.legs.decode(self.engine, asked.path, nixl_decode_body(asked.raw, kept), asked.headers)

    async def _prefilled(self, asked: SidecarRequest, prefill: Instance) -> dict[str, Any]:
        """What the prefill engine says of the KV that it keeps."""
        body = nixl_prefill_body(asked.path, asked.body)
        tries = 1 + self.config.prefill_retries
        while True:
            tries -= 1
            try:
                return await self.legs.prefill_and_keep(prefill, body, asked.headers, path=asked.path)
            except LegFailed as failure:
                if not tries or failure.answer is None or failure.answer.status not in _RETRIED:
                    raise

    async def _at_once(self, asked: SidecarRequest, prefill: Instance) -> EngineResponse:
        """Both legs over one list of token ids, under the gateway's grant."""
        endpoint = _ENDPOINTS.get(asked.path)
        if not asked.grant or endpoint is None:
            why = "x-prfaas-grant is missing" if endpoint else f"{asked.path} cannot be handed over"
            raise LegFailed("prefill", "prefill_without_transfer", why)
        parsed = ParsedRequest(endpoint, asked.body, asked.raw)
        prompt = None if parsed.obstacle() else await self.tokenizer.prompt(self.engine, parsed)
        if prompt is None or len(prompt.token_ids) < 2:
            raise LegFailed("prefill", "prefill_without_transfer", "its KV is not that of one list of token ids")
        first = parsed.prefill_body(prompt.token_ids, asked.grant, promised_tokens=0)
        then = parsed.decode_body(prompt.token_ids, asked.grant, rendered=prompt.rendered)
        return await self.legs.both(
            asyncio.create_task(self.legs.prefill(prefill, first, asked.headers)),
            asyncio.create_task(self.legs.decode(self.engine, asked.path, then, asked.headers)),
        )
