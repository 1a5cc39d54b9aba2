"""Hand-over of one request between two engines: the prefill leg, the decode leg, and the fallback after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prfaas import logs, metrics
from prfaas.router.engines.fleet import Instance
from prfaas.router.engines.legs import EngineResponse, LegClient, LegFailed
from prfaas.router.openai.request import ENDPOINTS, ParsedRequest, nixl_prefill_body, with_transfer_params
from prfaas.router.openai.tokenizer import Tokenizer
from prfaas.router.sidecar.config import SidecarConfig

_log = logs.get("sidecar")


@dataclass(frozen=True)
class SidecarRequest:
    """Client's request: path, raw and parsed body, headers for both legs, and the gateway's grant."""

    path: str
    raw: bytes
    body: dict[str, Any]
    headers: Mapping[str, str]
    grant: str = ""


@dataclass(frozen=True)
class Handover:
    """Opens responses of the decode engine to prompts that another engine prefills."""

    config: SidecarConfig
    engine: Instance
    legs: LegClient
    tokenizer: Tokenizer

    async def open(self, request: SidecarRequest, prefill: Instance) -> EngineResponse:
        """Return the decode engine's response after its first bytes.

        Raises:
            LegFailed: the decode engine failed.
        """
        send = self._send_both if self.config.protocol == "prfaas" else self._send_nixl
        try:
            response = await send(request, prefill)
        except LegFailed as failure:
            if failure.reason == "decode_unreachable":
                metrics.SIDECAR_REQUESTS.labels(outcome="failed").inc()
                raise
            _log.warning("prefill.failed", prefill=prefill.address.name, reason=failure.reason, message=str(failure))
            failure.without_traceback()
            metrics.SIDECAR_REQUESTS.labels(outcome="fell_back").inc()
            return await self.legs.decode(self.engine, request.path, request.raw, request.headers)
        metrics.SIDECAR_REQUESTS.labels(outcome="disaggregated").inc()
        return response

    async def _send_nixl(self, request: SidecarRequest, prefill: Instance) -> EngineResponse:
        """Send the prefill leg, and then the decode leg."""
        body = nixl_prefill_body(request.path, request.body)
        params = await self.legs.prefill_nixl(prefill, body, request.headers, path=request.path)
        decode_body = with_transfer_params(request.raw, params)
        return await self.legs.decode(self.engine, request.path, decode_body, request.headers)

    async def _send_both(self, request: SidecarRequest, prefill: Instance) -> EngineResponse:
        """Send both legs at once, over one list of token ids, under the gateway's grant."""
        endpoint = ENDPOINTS.get(request.path)
        if not request.grant or endpoint is None:
            reason = "x-prfaas-grant is missing" if endpoint else f"{request.path} cannot be handed over"
            raise LegFailed("prefill", "prefill_without_transfer", reason)
        parsed = ParsedRequest(endpoint, request.body, request.raw)
        prompt = None if parsed.obstacle() else await self.tokenizer.prompt(self.engine, parsed)
        if prompt is None or len(prompt.token_ids) < 2:
            raise LegFailed("prefill", "prefill_without_transfer", "one list of token ids cannot name its KV")
        prefill_body = parsed.prefill_body(prompt.token_ids, request.grant, promised_tokens=0)
        decode_body = parsed.decode_body(prompt.token_ids, request.grant, rendered=prompt.rendered)
        return await self.legs.both(
            asyncio.create_task(self.legs.prefill(prefill, prefill_body, request.headers)),
            asyncio.create_task(self.legs.decode(self.engine, request.path, decode_body, request.headers)),
        )
