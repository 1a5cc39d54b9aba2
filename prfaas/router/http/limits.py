"""Limits of clients before their requests are parsed: connections, time for headers and bodies, and body bytes in memory.

Clients that are slow, many or hostile leave room for others. Every refusal is counted by its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
from collections.abc import Awaitable, Callable
from typing import Any, cast

from aiohttp import web

from prfaas import metrics
from prfaas.router.config import LimitsConfig
from prfaas.router.http.admission import AdmissionRefused
from prfaas.router.http.budget import ClientBudget
from prfaas.router.openai.request import MAX_BODY_BYTES

RESERVED_DESCRIPTORS = 192  # For listening sockets, managers, files, and connections that are being refused.
MAX_CONNECTIONS = 65_536
# Whether a request has reached a handler. Releases of aiohttp without keys for requests take a text.
HANDLED: Any = web.RequestKey("handled", bool) if hasattr(web, "RequestKey") else "handled"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def raise_descriptor_limit() -> None:
    """Allow this process as many open files as the system permits."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def max_connections(config: LimitsConfig, *, descriptors_each: int) -> int:
    """Return the connections of clients that the limit on open files allows, each with this many descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = max(1, (soft - RESERVED_DESCRIPTORS) // descriptors_each)
    return min(config.connections or MAX_CONNECTIONS, allowed)


def network_of(host: str) -> str:
    """Return an address as a client: an IPv6 host may use all addresses of its /64 network."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address) or address.ipv4_mapped:
        return str(getattr(address, "ipv4_mapped", None) or address)
    return str(ipaddress.ip_network((address, 64), strict=False))


class ConnectionBudget:
    """Open connections of all clients, by address."""

    def __init__(self, total: int) -> None:
        self._budget = ClientBudget("connections", total)

    def open(self, host: str) -> bool:
        """Count a new connection. Return False if there are too many."""
        return self._budget.take(network_of(host))

    def close(self, host: str) -> None:
        """Count the end of a connection."""
        self._budget.give_back(network_of(host))


class HeldBody:
    """Body of one request, which counts for its client until it is released, at the latest when the context ends."""

    def __init__(self, budget: ClientBudget, client: str, *, seconds: float) -> None:
        self._budget = budget
        self._client = client
        self._seconds = seconds
        self._num_bytes = 0

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Stop counting the body, which nobody needs any more."""
        if self._num_bytes:
            self._budget.give_back(self._client, self._num_bytes)
            self._num_bytes = 0

    async def read(self, request: web.Request) -> bytes:
        """Return the body of a request.

        Raises:
            AdmissionRefused: the body is late, or its client holds too much already.
            web.HTTPRequestEntityTooLarge: it is too large.
        """
        if (request.content_length or 0) > MAX_BODY_BYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, request.content_length or 0)
        if request.content.is_eof():  # The whole body came with the headers.
            whole = await request.content.read()
            self._take(len(whole))
            return whole
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(self._seconds):
                async for chunk in request.content.iter_any():
                    self._take(len(chunk))
                    chunks.append(chunk)
        except TimeoutError as error:
            metrics.CLIENT_REFUSALS.labels(reason="slow_body").inc()
            raise AdmissionRefused(408, f"the body has not come within {self._seconds:g} s") from error
        return b"".join(chunks)

    def _take(self, num_bytes: int) -> None:
        """Count bytes that have come.

        Raises:
            AdmissionRefused: the client holds too much already.
            web.HTTPRequestEntityTooLarge: the body is too large.
        """
        if self._num_bytes + num_bytes > MAX_BODY_BYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, self._num_bytes + num_bytes)
        if not self._budget.take(self._client, num_bytes):
            raise AdmissionRefused(429, "too many request bodies are in memory; retry later")
        self._num_bytes += num_bytes


class ClientConnection(asyncio.Protocol):
    """Connection of a client in front of aiohttp's protocol. It ends when the headers of a request are late."""

    def __init__(self, inner: asyncio.Protocol, connections: ClientConnections) -> None:
        self._inner = inner
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self.address = ""
        self.waits_since: float | None = None
        """When it began to send a request whose headers are not complete; None while there is none."""
        self._has_request = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        opened = cast("asyncio.Transport", transport)
        self.address = self._connections.admit(opened, self)
        if not self.address:
            opened.abort()
            return
        self._transport = opened
        self._inner.connection_made(opened)
        self.waits_since = self._connections.now()

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        if self.waits_since is None and not self._has_request:
            self.waits_since = self._connections.now()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._transport is not None else None

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is None:
            return
        self._connections.forget(self._transport)
        self._inner.connection_lost(error)

    def begin_request(self) -> None:
        """Note that the headers of a request are complete."""
        self.waits_since = None
        self._has_request = True

    def end_request(self) -> None:
        """Note that the request has been read and answered. Time counts from the first byte of the next one."""
        self._has_request = False

    def end_late(self) -> None:
        """End the connection, because headers are late."""
        metrics.CLIENT_REFUSALS.labels(reason="slow_headers").inc()
        assert self._transport is not None, "only admitted connections are checked"
        self._transport.abort()


class ClientConnections:
    """All connections of clients at one port.

    Behind a TLS proxy `proxied` returns the host of the proxy's peer by its source port.
    """

    def __init__(
        self, budget: ConnectionBudget, *, header_seconds: float, proxied: Callable[[int], str | None] | None = None
    ) -> None:
        self.now = asyncio.get_running_loop().time
        self._header_seconds = header_seconds
        self._budget = budget
        self._proxied = proxied
        self._connections: dict[asyncio.BaseTransport, ClientConnection] = {}

    def wrap(self, make_inner: Callable[[], Any]) -> Callable[[], ClientConnection]:
        """Return the factory of a listening socket's protocols."""
        return lambda: ClientConnection(make_inner(), self)

    def admit(self, transport: asyncio.Transport, connection: ClientConnection) -> str:
        """Return the address of a new connection; empty if it is refused."""
        host, port = transport.get_extra_info("peername")[:2]
        if self._proxied is not None:  # The proxy has counted the connection.
            host = self._proxied(port) or host
        elif not self._budget.open(host):
            return ""
        self._connections[transport] = connection
        return network_of(host)

    def forget(self, transport: asyncio.Transport) -> None:
        """Note the end of a connection that was admitted."""
        del self._connections[transport]
        if self._proxied is None:
            self._budget.close(transport.get_extra_info("peername")[0])

    async def watch_forever(self) -> None:
        """End the connections whose headers are late. One check of all is cheaper than a timer for each request."""
        while True:
            await asyncio.sleep(min(1.0, self._header_seconds / 4))
            limit = self.now() - self._header_seconds
            for connection in list(self._connections.values()):
                if connection.waits_since is not None and connection.waits_since < limit:
                    connection.end_late()

    def address(self, request: web.Request) -> str:
        """Return the address of a request's client."""
        connection = self._connections.get(request.transport) if request.transport is not None else None
        return connection.address if connection is not None else ""

    def middleware(self) -> Any:
        """Return the middleware that notes the beginning and the end of each request."""

        @web.middleware
        async def follow(request: web.Request, handler: Handler) -> web.StreamResponse:
            request[HANDLED] = request.match_info.http_exception is None
            connection = self._connections.get(request.transport) if request.transport is not None else None
            if connection is None:
                return await handler(request)
            connection.begin_request()
            try:
                response = await handler(request)
            except web.HTTPException as refusal:
                _close_if_unread(request, refusal, connection)
                raise
            _close_if_unread(request, response, connection)
            return response

        return follow


def _close_if_unread(request: web.Request, response: web.StreamResponse, connection: ClientConnection) -> None:
    """End a request. After the answer to one whose body has not all come, aiohttp closes the connection."""
    if request.content.is_eof():
        connection.end_request()
    else:
        response.force_close()
