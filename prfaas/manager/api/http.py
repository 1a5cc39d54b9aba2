"""HTTP server of a manager: metrics, liveness and readiness, JSON pages, the dashboard."""

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from prfaas.errors import ConfigError
from prfaas.manager.dashboard.pages import DashboardPages
from prfaas.units import split_address

# Limit for clients that have stopped reading, so that the rest of the stop fits into a container's 30 s.
_SHUTDOWN_SECONDS = 5.0
_FIRST_REQUEST_SECONDS = 10.0  # A connection without a whole request header by then is closed.
_KEEPALIVE_SECONDS = 30.0  # The same after each answer.


class HttpServer:
    """HTTP server on one address."""

    def __init__(
        self,
        listen: str,
        *,
        refresh_metrics: Callable[[], None],
        is_ready: Callable[[], bool],
        json_pages: Mapping[str, Callable[[], Any]],
        decision: Callable[[bytes], dict[str, Any] | None],
        dashboard: DashboardPages,
    ) -> None:
        """`json_pages` maps paths to functions that return their documents; `decision` returns that of a decision."""
        self._listen = listen
        self._refresh_metrics = refresh_metrics
        self._is_ready = is_ready
        self._document = decision
        self._dashboard = dashboard
        self._routes = [
            web.get("/metrics", self._metrics),
            web.get("/healthz", self._healthz),
            web.get("/readyz", self._readyz),
            *(web.get(path, _json_page(document)) for path, document in json_pages.items()),
            web.get("/decisions/{id}", self._decision),
            *dashboard.routes(),
        ]
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._used = weakref.WeakSet[asyncio.BaseTransport]()  # Connections that have brought a request.
        self.address = ""

    async def start(self) -> None:
        """Listen; port 0 takes a free one.

        Raises:
            ConfigError: the address is taken, or does not belong to this machine.
        """
        app = web.Application(middlewares=[self._note_use])
        app.add_routes(self._routes)
        app.on_shutdown.append(self._dashboard.close)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS, keepalive_timeout=_KEEPALIVE_SECONDS
        )
        await self._runner.setup()
        host, port = split_address(self._listen)
        try:
            self._server = await asyncio.get_running_loop().create_server(self._connection, host, port)
        except OSError as error:
            raise ConfigError(f"http_listen: {error}") from error
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    def _connection(self) -> asyncio.Protocol:
        """Return the protocol of a new connection, which ends if no request comes."""
        assert self._runner is not None and self._runner.server is not None, "set up before"
        protocol = self._runner.server()
        asyncio.get_running_loop().call_later(_FIRST_REQUEST_SECONDS, self._close_unused, protocol)
        return protocol

    def _close_unused(self, protocol: web.RequestHandler) -> None:
        transport = protocol.transport
        if transport is not None and transport not in self._used:
            transport.abort()

    @web.middleware
    async def _note_use(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.transport is not None:
            self._used.add(request.transport)
        return await handler(request)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        self._refresh_metrics()
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        ready = self._is_ready()
        return web.Response(text="ready\n" if ready else "not ready\n", status=200 if ready else 503)

    async def _decision(self, request: web.Request) -> web.Response:
        try:
            document = self._document(bytes.fromhex(request.match_info["id"]))
        except ValueError:
            document = None
        if document is None:
            return web.json_response({"error": "not among the latest decisions of this manager"}, status=404)
        return web.json_response(document)


def _json_page(document: Callable[[], Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def page(request: web.Request) -> web.Response:
        return web.json_response(document())

    return page
