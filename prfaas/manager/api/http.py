"""HTTP beside gRPC: /metrics, /healthz (it lives), /readyz (it answers), JSON of what the manager knows, /dashboard/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from google.protobuf.json_format import MessageToDict
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from prfaas.errors import ConfigError
from prfaas.manager.dashboard.pages import DashboardPages
from prfaas.manager.routing.decision_log import DecisionLog
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.units import split_address

MAX_BODY_BYTES = 16 << 20  # a prompt of a million token ids
_SHUTDOWN_SECONDS = 5.0  # for those that stopped reading: what comes after has its part of a container's 30 s


@dataclass(frozen=True)
class Views:
    """What the pages show."""

    refresh_metrics: Callable[[], None]
    is_ready: Callable[[], bool]
    state: Callable[[], pb.StateSnapshot]
    digests: Callable[[], dict[str, str]]
    pool: Callable[[], list[dict[str, Any]]]
    hot: Callable[[], list[dict[str, Any]]]
    plan: Callable[[], dict[str, Any]]
    decisions: DecisionLog
    ppd_table: Callable[[], dict[str, Any]]


class HttpServer:
    """One HTTP server on one address."""

    def __init__(
        self, listen: str, views: Views, dashboard: DashboardPages, *, further: Sequence[web.RouteDef] = ()
    ) -> None:
        self._listen = listen
        self._views = views
        self._dashboard = dashboard
        self._further = further
        self._runner: web.AppRunner | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen; port 0 takes a free one.

        Raises:
            ConfigError: the address is taken, or none of this machine.
        """
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/state", self._state),
                web.get("/digests", self._digests),
                web.get("/pool", self._pool),
                web.get("/hot", self._hot),
                web.get("/plan", self._plan),
                web.get("/ppd", self._ppd),
                web.get("/decisions/{id}", self._decision),
                *self._dashboard.routes(),
                *self._further,
            ]
        )
        app.on_shutdown.append(self._dashboard.close)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
        await self._runner.setup()
        host, port = split_address(self._listen)
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            raise ConfigError(f"http_listen: {error}") from error
        self.address = f"{host}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        self._views.refresh_metrics()
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        ready = self._views.is_ready()
        return web.Response(text="ready\n" if ready else "not ready\n", status=200 if ready else 503)

    async def _state(self, request: web.Request) -> web.Response:
        return web.json_response(MessageToDict(self._views.state(), preserving_proto_field_name=True))

    async def _digests(self, request: web.Request) -> web.Response:
        return web.json_response(self._views.digests())

    async def _pool(self, request: web.Request) -> web.Response:
        return web.json_response(self._views.pool())

    async def _hot(self, request: web.Request) -> web.Response:
        return web.json_response(self._views.hot())

    async def _plan(self, request: web.Request) -> web.Response:
        return web.json_response(self._views.plan())

    async def _ppd(self, request: web.Request) -> web.Response:
        return web.json_response(self._views.ppd_table())

    async def _decision(self, request: web.Request) -> web.Response:
        try:
            found = self._views.decisions.get(bytes.fromhex(request.match_info["id"]))
        except ValueError:
            found = None
        if found is None:
            return web.json_response({"error": "not one of the latest decisions of this manager"}, status=404)
        return web.json_response(found.document())
