"""One HTTP request as a gateway shows it: headers and body come in, the destination and the body go back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from aiohttp import web
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2

from prfaas.router.ext_proc.endpoint_choice import Asked, Choosing
from prfaas.router.ext_proc.messages import (
    go_on,
    headers_of,
    phase_of,
    pieces,
    refuse,
    send_to,
    subset_of,
    with_headers,
)
from prfaas.router.http.app import REFUSALS, refused
from prfaas.router.openai.headers import request_id_of
from prfaas.router.routing.record import Record

_Mode = processing_mode_pb2.ProcessingMode


class Exchange:
    """The state of one stream. Bodies come whole (`BUFFERED`) or in pieces that are given back (`FULL_DUPLEX_STREAMED`).

    While a piece may still come nothing goes back, since the headers, and with them the destination, go first.
    """

    def __init__(self, choosing: Choosing, *, max_body_bytes: int) -> None:
        self._choosing = choosing
        self._max_body_bytes = max_body_bytes
        self._headers: dict[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._body = bytearray()
        self._is_duplex = False
        self._response_is_duplex = False
        self._record = Record(request_id_of(None))
        self._under_way = contextlib.ExitStack()

    async def run(self, messages: AsyncIterable[Any]) -> AsyncIterator[Any]:
        """Yield the answers to a stream's messages; the instances are busy until it ends."""
        with self._under_way:
            async for message in messages:
                for answer in await self._answers(message):
                    yield answer

    async def _answers(self, message: Any) -> list[Any]:
        phase = phase_of(message)
        match phase:
            case "request_headers":
                return await self._request_headers(message)
            case "request_body":
                return await self._request_body(message.request_body)
            case "response_headers":
                return self._response_headers(message)
            case "request_trailers":
                return [*await self._whole(ends=False), go_on(phase)] if self._is_duplex else [go_on(phase)]
            case "response_body" if self._response_is_duplex:
                its = message.response_body
                return list(pieces(phase, its.body, ends=its.end_of_stream))
            case None:
                return []
            case _:
                return [go_on(phase)]

    async def _request_headers(self, message: Any) -> list[Any]:
        modes = message.protocol_config
        self._is_duplex = modes.request_body_mode == _Mode.FULL_DUPLEX_STREAMED
        self._response_is_duplex = modes.response_body_mode == _Mode.FULL_DUPLEX_STREAMED
        self._headers = headers_of(message.request_headers)
        self._record = Record(request_id_of(self._headers.get("x-request-id")))
        self._under_way.callback(self._record.tell)
        self._under_way.callback(self._record.ended)
        self._subset = subset_of(message)
        if message.request_headers.end_of_stream:
            return await self._choose("request_headers")
        return [] if self._is_duplex else [go_on("request_headers")]

    async def _request_body(self, its: Any) -> list[Any]:
        if len(self._body) + len(its.body) > self._max_body_bytes:
            too_large = web.HTTPRequestEntityTooLarge(self._max_body_bytes, len(self._body) + len(its.body))
            return [self._refusal(too_large)]
        self._body += its.body
        if not self._is_duplex:  # it is whole, also where trailers end the stream
            return await self._choose("request_body")
        return await self._whole(ends=True) if its.end_of_stream else []

    async def _whole(self, *, ends: bool) -> list[Any]:
        """Return the destination, then the body, which it leaves salted."""
        answers = await self._choose("request_headers")
        if answers[0].HasField("immediate_response"):
            return answers
        return [*answers, *pieces("request_body", bytes(self._body), ends=ends)]

    async def _choose(self, phase: str) -> list[Any]:
        asked = Asked(self._headers.get(":path", ""), self._headers, bytes(self._body), self._subset)
        try:
            client = self._choosing.admit(self._headers, self._record)
            self._under_way.enter_context(self._choosing.admission.place())
            chosen = await self._choosing.choose(asked, client, self._record)
        except REFUSALS as error:
            return [self._refusal(error)]
        self._under_way.enter_context(chosen.under_way())
        if chosen.body is None:
            return [send_to(phase, chosen.headers)]
        self._body[:] = chosen.body
        return [send_to(phase, chosen.headers, body=None if self._is_duplex else chosen.body)]

    def _refusal(self, error: Exception) -> Any:
        response = refused(error, max_body_bytes=self._max_body_bytes)
        self._record.status = response.status
        body = response.body if isinstance(response.body, bytes) else b""
        headers = {name: response.headers[name] for name in ("Content-Type", "Retry-After") if name in response.headers}
        return refuse(response.status, body, headers | self._record.headers())

    def _response_headers(self, message: Any) -> list[Any]:
        status = headers_of(message.response_headers).get(":status", "")
        self._record.answered(int(status) if status.isdigit() else 0)
        return [with_headers("response_headers", self._record.headers())]
