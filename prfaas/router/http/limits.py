"""Budgets of all clients together and of each: connections, time for headers and bodies, and body bytes in memory.

An address is a client before its key is known, and a key is a client afterwards. No client may hold more than a share of
anything, so that clients that are slow, many or hostile leave room for others. Every refusal is counted by its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from aiohttp import web

from prfaas import metrics
from prfaas.router.config import LimitsConfig
from prfaas.router.http.admission import AdmissionRefused
from prfaas.router.openai.request import MAX_BODY_BYTES

RESERVED_DESCRIPTORS = 192  # For listening sockets, managers, files, and connections that are being refused.
MAX_CONNECTIONS = 65_536
LONE_SECONDS = 60.0  # Time after which an absent client gets no room kept.
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


def share(total: int, ratio: float) -> int:
    """Return one client's part of a limit, which is at least one."""
    return max(1, int(total * ratio))


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
    """Open connections of all clients, and of each address."""

    def __init__(self, total: int, per_address: int) -> None:
        self.total = total
        self.per_address = per_address
        self._open: Counter[str] = Counter()
        self._num_open = 0

    def open(self, host: str) -> bool:
        """Count a new connection. Return False, and count a refusal, if there are too many."""
        address = network_of(host)
        reason = "connections" if self._num_open >= self.total else "connections_of_address"
        if reason == "connections" or self._open[address] >= self.per_address:
            metrics.CLIENT_REFUSALS.labels(reason=reason).inc()
            return False
        self._open[address] += 1
        self._num_open += 1
        return True

    def close(self, host: str) -> None:
        """Count the end of a connection."""
        address = network_of(host)
        self._num_open -= 1
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


class BodyBudget:
    """Bytes of request bodies in memory, in total and by client.

    Each client may hold its share. A lone client, beside which no other has come for `LONE_SECONDS`, may hold everything.
    Its bodies on their way stay within the share nevertheless, so that slow ones leave room for the next client.
    """

    def __init__(self, total_bytes: int, bytes_per_client: int, seconds: float) -> None:
        self.seconds = seconds
        self._total_bytes = total_bytes
        self._bytes_per_client = max(bytes_per_client, MAX_BODY_BYTES)
        self._num_bytes = 0
        self._held: Counter[str] = Counter()
        self._coming: Counter[str] = Counter()  # The part of `_held` whose bodies are not complete.
        self._latest: tuple[dict[str, float], dict[str, float]] = ({}, {})  # Two latest addresses, and owners of keys.

    def hold(self, address: str, owner: str) -> HeldBody:
        """Return the body of one request, which counts for its address and for its key's owner."""
        clients = (f"address {address}", f"key {owner}")
        for latest, client in zip(self._latest, clients, strict=True):
            latest.pop(client, None)
            latest[client] = time.monotonic()
            if len(latest) > 2:
                del latest[next(iter(latest))]
        return HeldBody(self, clients)

    def count(self, clients: Sequence[str], *, held: int = 0, coming: int = 0) -> None:
        """Add to the bytes in memory, and to the part of them whose bodies are not complete."""
        self._num_bytes += held
        for counter, num_bytes in ((self._held, held), (self._coming, coming)):
            for client in clients:
                counter[client] += num_bytes
                if not counter[client]:
                    del counter[client]

    def check_room(self, clients: Sequence[str], num_bytes: int) -> None:
        """Check that a body may have so many bytes more.

        Raises:
            AdmissionRefused: there are too many.
        """
        if self._num_bytes + num_bytes > self._total_bytes:
            reason = "body_bytes"
        elif any(
            (self._coming if self._is_alone(client, latest) else self._held)[client] + num_bytes
            > self._bytes_per_client
            for latest, client in zip(self._latest, clients, strict=True)
        ):
            reason = "body_bytes_of_client"
        else:
            return
        metrics.CLIENT_REFUSALS.labels(reason=reason).inc()
        raise AdmissionRefused(429, "too many request bodies are in memory; retry later")

    @staticmethod
    def _is_alone(client: str, latest: Mapping[str, float]) -> bool:
        since = time.monotonic() - LONE_SECONDS
        return all(name == client or at < since for name, at in latest.items())


class HeldBody:
    """Body of one request, whose bytes count for its clients until it is released, at the latest when the context ends."""

    def __init__(self, budget: BodyBudget, clients: Sequence[str]) -> None:
        self._budget = budget
        self._clients = clients
        self._num_bytes = 0
        self._is_complete = False

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Stop counting the body, which nobody needs any more."""
        self.complete()
        self._budget.count(self._clients, held=-self._num_bytes)
        self._num_bytes = 0

    def complete(self) -> None:
        """Note that the whole body has come."""
        if not self._is_complete:
            self._budget.count(self._clients, coming=-self._num_bytes)
            self._is_complete = True

    async def read(self, request: web.Request) -> bytes:
        """Return the body of a request.

        Raises:
            AdmissionRefused: the body is late, or its clients hold too much already.
            web.HTTPRequestEntityTooLarge: it is too large.
        """
        if (request.content_length or 0) > MAX_BODY_BYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, request.content_length or 0)
        if request.content.is_eof():  # The whole body came with the headers.
            whole = await request.content.read()
            self.take(len(whole))
            self.complete()
            return whole
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(self._budget.seconds):
                async for chunk in request.content.iter_any():
                    self.take(len(chunk))
                    chunks.append(chunk)
        except TimeoutError as error:
            metrics.CLIENT_REFUSALS.labels(reason="slow_body").inc()
            raise AdmissionRefused(408, f"the body has not come within {self._budget.seconds:g} s") from error
        self.complete()
        return b"".join(chunks)

    def take(self, num_bytes: int) -> None:
        """Count bytes that have come.

        Raises:
            AdmissionRefused: the clients hold too much already.
            web.HTTPRequestEntityTooLarge: the body is too large.
        """
        if self._num_bytes + num_bytes > MAX_BODY_BYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, self._num_bytes + num_bytes)
        self._budget.check_room(self._clients, num_bytes)
        self._budget.count(self._clients, held=num_bytes, coming=num_bytes)
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
