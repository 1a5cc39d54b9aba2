"""One HTTP request as a gateway shows it: headers and body come in, the destination and the body go back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import grpc
from aiohttp import web
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from prfaas import metrics
from prfaas.errors import ConfigError
from prfaas.router.config import RouterConfig
from prfaas.router.ext_proc.endpoint_choice import EndpointChooser, GatewayRequest
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
from prfaas.router.routing.record import RequestRecord
from prfaas.rpc.methods import read_message
from prfaas.transport.net.tls_proxy import INNER, TlsProxy
from prfaas.units import split_address

_Mode = processing_mode_pb2.ProcessingMode


class Exchange:
    """The state of one stream. Bodies come whole (`BUFFERED`) or in pieces that are given back (`FULL_DUPLEX_STREAMED`).

    While a piece may still come nothing goes back, since the headers, and with them the destination, go first.
    """

    def __init__(self, choosing: EndpointChooser, *, max_body_bytes: int) -> None:
        self._choosing = choosing
        self._max_body_bytes = max_body_bytes
        self._headers: dict[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._body = bytearray()
        self._is_duplex = False
        self._response_is_duplex = False
        self._record = RequestRecord(request_id_of(None))
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
        self._record = RequestRecord(request_id_of(self._headers.get("x-request-id")))
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
        asked = GatewayRequest(self._headers.get(":path", ""), self._headers, bytes(self._body), self._subset)
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


DRAIN_SECONDS = 10.0
MAX_HEADERS_BYTES = 1 << 20  # of a message, beside the body
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


class _Processor:
    """One exchange a stream."""

    def __init__(self, choosing: EndpointChooser, *, max_body_bytes: int) -> None:
        self._choosing = choosing
        self._max_body_bytes = max_body_bytes

    def handlers(self) -> Any:
        """gRPC's generic handler for the service."""
        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=functools.partial(read_message, pb.ProcessingRequest),
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": process})

    async def _process(self, messages: Any, context: Any) -> AsyncIterator[Any]:
        exchange = Exchange(self._choosing, max_body_bytes=self._max_body_bytes)
        async for answer in exchange.run(_readable(messages, context)):
            yield answer


async def _readable(messages: Any, context: Any) -> AsyncIterator[Any]:
    """Yield the messages of a stream, which ends with an error at the first that is none."""
    async for message in messages:
        if message is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a message of Envoy's external processing")
        yield message


@contextlib.asynccontextmanager
async def open_picker(config: RouterConfig, choosing: EndpointChooser) -> AsyncIterator[str]:
    """The host:port where gateways are answered as long as the block runs.

    Raises:
        ConfigError: the address is taken, or the certificates cannot be used.
    """
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", config.max_body_bytes + MAX_HEADERS_BYTES)])
    processor = _Processor(choosing, max_body_bytes=config.max_body_bytes)
    server.add_generic_rpc_handlers((processor.handlers(),))
    serving = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(serving, server)
    door = _door(config)
    listen = INNER if door else config.ext_proc_listen
    address = f"{split_address(listen)[0]}:{_bind(server, listen)}"
    await server.start()
    for name in ("", SERVICE):
        await serving.set(name, health_pb2.HealthCheckResponse.SERVING)
    if door is not None:
        door.start(address)
    try:
        yield door.address if door else address
    finally:
        await serving.enter_graceful_shutdown()
        await server.stop(DRAIN_SECONDS)
        if door is not None:
            await door.close()


def _door(config: RouterConfig) -> TlsProxy | None:
    """Mutual: gateways show a certificate of the same authority."""
    certificates = config.certificates(speaks=("h2",))
    if certificates is None:
        return None
    refused = metrics.GATEWAY_REFUSALS
    door = TlsProxy(
        config.ext_proc_listen,
        certificates,
        setting="ext_proc_listen",
        refused=lambda reason: refused.labels(reason=reason).inc(),
    )
    door.bind()
    return door


def _bind(server: Any, listen: str) -> int:
    try:
        return int(server.add_insecure_port(listen))
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"ext_proc_listen {listen}: {error}") from error
