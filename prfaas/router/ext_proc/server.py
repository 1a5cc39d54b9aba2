"""Serves `envoy.service.ext_proc.v3.ExternalProcessor` beside the front door's routes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from prfaas import metrics
from prfaas.errors import ConfigError
from prfaas.router.config import RouterConfig
from prfaas.router.ext_proc.endpoint_choice import Choosing
from prfaas.router.ext_proc.exchange import Exchange
from prfaas.rpc.methods import read_message
from prfaas.transport.net.tls_proxy import INNER, TlsProxy
from prfaas.units import split_address

DRAIN_SECONDS = 10.0
MAX_HEADERS_BYTES = 1 << 20  # of a message, beside the body
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


class _Processor:
    """One exchange a stream."""

    def __init__(self, choosing: Choosing, *, max_body_bytes: int) -> None:
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
async def open_picker(config: RouterConfig, choosing: Choosing) -> AsyncIterator[str]:
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
