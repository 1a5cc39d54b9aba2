"""gRPC server `envoy.service.ext_proc.v3.ExternalProcessor`: one exchange for each HTTP request of a gateway."""

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
from prfaas.router.ext_proc.messages import body_chunks, headers_of, refuse, send_to, subset_of, unchanged, with_headers
from prfaas.router.http.app import REFUSALS, refusal_response
from prfaas.router.openai.headers import request_id_of
from prfaas.router.openai.request import MAX_BODY_BYTES
from prfaas.router.routing.record import RequestRecord
from prfaas.rpc.methods import read_message
from prfaas.transport.net.tls import Certificates
from prfaas.transport.net.tls_proxy import INNER, TlsProxy
from prfaas.units import split_address

MAX_HEADERS_BYTES = 1 << 20  # Part of a message beside the body.
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_Mode = processing_mode_pb2.ProcessingMode


class Exchange:
    """State of one stream: the gateway shows headers and body, and gets the destination and the body back.

    Bodies come in chunks that are given back (`FULL_DUPLEX_STREAMED`). Nothing is given back before the body is complete,
    because the headers, and with them the destination, go first.
    """

    def __init__(self, chooser: EndpointChooser) -> None:
        self._chooser = chooser
        self._headers: dict[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._body = bytearray()
        self._is_response_duplex = False
        self._record = RequestRecord(request_id_of(None))
        self._running = contextlib.ExitStack()

    async def run(self, messages: AsyncIterable[Any]) -> AsyncIterator[Any]:
        """Yield the responses to a stream's messages. The instances count the request until the stream ends."""
        with self._running:
            async for message in messages:
                for response in await self._respond(message):
                    yield response

    async def _respond(self, message: Any) -> list[Any]:
        phase = message.WhichOneof("request")
        match phase:
            case "request_headers":
                return await self._request_headers(message)
            case "request_body":
                return await self._request_body(message.request_body)
            case "response_headers":
                return self._response_headers(message)
            case "request_trailers":
                return [*await self._choose_streamed(ends=False), unchanged(phase)]
            case "response_body" if self._is_response_duplex:
                body = message.response_body
                return list(body_chunks(phase, body.body, ends=body.end_of_stream))
            case None:
                return []
            case _:
                return [unchanged(phase)]

    async def _request_headers(self, message: Any) -> list[Any]:
        self._is_response_duplex = message.protocol_config.response_body_mode == _Mode.FULL_DUPLEX_STREAMED
        self._headers = headers_of(message.request_headers)
        self._record = RequestRecord(request_id_of(self._headers.get("x-request-id")))
        self._running.callback(self._record.publish)
        self._running.callback(self._record.end)
        self._subset = subset_of(message)
        if message.request_headers.end_of_stream:
            return [await self._choose()]
        return []

    async def _request_body(self, chunk: Any) -> list[Any]:
        num_bytes = len(self._body) + len(chunk.body)
        if num_bytes > MAX_BODY_BYTES:
            return [self._refusal(web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, num_bytes))]
        self._body += chunk.body
        return await self._choose_streamed(ends=True) if chunk.end_of_stream else []

    async def _choose_streamed(self, *, ends: bool) -> list[Any]:
        """Return the destination, then the body with its salt."""
        response = await self._choose()
        if response.HasField("immediate_response"):
            return [response]
        return [response, *body_chunks("request_body", bytes(self._body), ends=ends)]

    async def _choose(self) -> Any:
        request = GatewayRequest(self._headers.get(":path", ""), self._headers, bytes(self._body), self._subset)
        try:
            client = self._chooser.admit(self._headers, self._record)
            self._running.enter_context(self._chooser.admission.place(client))
            choice = await self._chooser.choose(request, client, self._record)
        except REFUSALS as error:
            return self._refusal(error)
        self._running.enter_context(choice.running())
        if choice.body is not None:
            self._body[:] = choice.body
        return send_to("request_headers", choice.headers)

    def _refusal(self, error: Exception) -> Any:
        response = refusal_response(error)
        self._record.status = response.status
        body = response.body if isinstance(response.body, bytes) else b""
        headers = {name: response.headers[name] for name in ("Content-Type", "Retry-After") if name in response.headers}
        return refuse(response.status, body, headers | self._record.headers())

    def _response_headers(self, message: Any) -> list[Any]:
        status = headers_of(message.response_headers).get(":status", "")
        self._record.note_answer(int(status) if status.isdigit() else 0)
        return [with_headers("response_headers", self._record.headers())]


@contextlib.asynccontextmanager
async def open_picker(config: RouterConfig, chooser: EndpointChooser) -> AsyncIterator[str]:
    """Answer gateways while the block runs, and yield the address (host:port).

    Raises:
        ConfigError: the address is taken, or the certificates are unusable.
    """
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_BODY_BYTES + MAX_HEADERS_BYTES)])
    server.add_generic_rpc_handlers((_service(chooser),))
    health_service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    proxy = _gateway_proxy(config)
    listen = INNER if proxy else config.ext_proc_listen
    address = f"{split_address(listen)[0]}:{_bind(server, listen)}"
    await server.start()
    for name in ("", SERVICE):
        await health_service.set(name, health_pb2.HealthCheckResponse.SERVING)
    if proxy is not None:
        proxy.start(address)
    try:
        yield proxy.address if proxy else address
    finally:
        await health_service.enter_graceful_shutdown()
        await server.stop(config.request_timeout)
        if proxy is not None:
            await proxy.close()


def _service(chooser: EndpointChooser) -> Any:
    """Return gRPC's generic handler for the service."""

    async def process(messages: Any, context: Any) -> AsyncIterator[Any]:
        async for response in Exchange(chooser).run(_valid_messages(messages, context)):
            yield response

    method = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=functools.partial(read_message, pb.ProcessingRequest),
        response_serializer=pb.ProcessingResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"Process": method})


async def _valid_messages(messages: Any, context: Any) -> AsyncIterator[Any]:
    """Yield the messages of a stream, and abort it at the first invalid message, or if it would not show the body."""
    async for message in messages:
        if message is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a message of Envoy's external processing")
        has_body = message.HasField("request_headers") and not message.request_headers.end_of_stream
        if has_body and message.protocol_config.request_body_mode != _Mode.FULL_DUPLEX_STREAMED:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "write request_body_mode: FULL_DUPLEX_STREAMED in the gateway"
            )
        yield message


def _gateway_proxy(config: RouterConfig) -> TlsProxy | None:
    """Return the TLS proxy in front of the port. Gateways must show a certificate of the same authority."""
    certificates = Certificates.of(config.tls, alpn_protocols=("h2",))
    if certificates is None:
        return None
    refusals = metrics.GATEWAY_REFUSALS
    proxy = TlsProxy(
        config.ext_proc_listen,
        certificates,
        setting="ext_proc_listen",
        refused=lambda reason: refusals.labels(reason=reason).inc(),
    )
    proxy.bind()
    return proxy


def _bind(server: Any, listen: str) -> int:
    try:
        return int(server.add_insecure_port(listen))
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"ext_proc_listen {listen}: {error}") from error
