"""gRPC server whose methods a test writes, in the place of a manager."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from prfaas.rpc.methods import SERVICE_NAME


@asynccontextmanager
async def scripted_manager(*, num_addresses: int = 1, **methods: Any) -> AsyncIterator[list[str]]:
    """Serve gRPC handlers by method name, and yield the addresses."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, methods),))
    addresses = [f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}" for _ in range(num_addresses)]
    await server.start()
    try:
        yield addresses
    finally:
        await server.stop(None)
