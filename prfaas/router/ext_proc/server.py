"""Serves `envoy.service.ext_proc.v3.ExternalProcessor` beside the front door's routes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from prfaas.errors import ConfigError
from prfaas.router.config import RouterConfig
from prfaas.router.ext_proc.choosing import Choosing
from prfaas.router.ext_proc.exchange import Exchange
from prfaas.rpc.channel import Tls
from prfaas.units import is_loopback, split_address

DRAIN_SECONDS = 10.0
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


class _Processor(external_processor_pb2_grpc.ExternalProcessorServicer):  # type: ignore[misc]
    """One exchange a stream."""

    def __init__(self, choosing: Choosing, *, max_body_bytes: int) -> None:
        self._choosing = choosing
        self._max_body_bytes = max_body_bytes

    async def Process(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        exchange = Exchange(self._choosing, max_body_bytes=self._max_body_bytes)
        async for answer in exchange.run(request_iterator):
            yield answer


@contextlib.asynccontextmanager
async def open_picker(config: RouterConfig, choosing: Choosing) -> AsyncIterator[str]:
    """The host:port where gateways are answered as long as the block runs.

    Raises:
        ConfigError: the address is taken, or beyond loopback without TLS and without `insecure_plaintext`.
    """
    server = grpc.aio.server()
    processor = _Processor(choosing, max_body_bytes=config.max_body_bytes)
    external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(processor, server)
    serving = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(serving, server)
    host, _ = split_address(config.ext_proc_listen)
    port = _bind(server, config, host)
    await server.start()
    for name in ("", SERVICE):
        await serving.set(name, health_pb2.HealthCheckResponse.SERVING)
    try:
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        await serving.enter_graceful_shutdown()
        await server.stop(DRAIN_SECONDS)


def _bind(server: Any, config: RouterConfig, host: str) -> int:
    tls = Tls.of(config.tls_authority, config.tls_certificate, config.tls_key)
    try:
        if tls is not None:
            return int(server.add_secure_port(config.ext_proc_listen, _credentials(tls)))
        if not (config.insecure_plaintext or is_loopback(host)):
            beyond = "beyond loopback set tls_* or insecure_plaintext: true"
            raise ConfigError(f"ext_proc_listen {config.ext_proc_listen}: {beyond}")
        return int(server.add_insecure_port(config.ext_proc_listen))
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"ext_proc_listen {config.ext_proc_listen}: {error}") from error


def _credentials(tls: Tls) -> Any:
    """Mutual: gateways show a certificate of the same authority."""
    chain = ((tls.key.read_bytes(), tls.certificate.read_bytes()),)
    return grpc.ssl_server_credentials(chain, tls.authority.read_bytes(), require_client_auth=True)
