"""The sidecar's routes: completions with a prefill header are handed over, everything else is the engine's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Literal

import aiohttp
from aiohttp import web
from prometheus_client import generate_latest

from prfaas import logs, metrics
from prfaas.router.engines.fleet import Instance, InstanceAddress
from prfaas.router.engines.legs import LegClient
from prfaas.router.http.app import REFUSALS, error_response, refused
from prfaas.router.http.proxy import Proxy
from prfaas.router.openai.headers import GRANT_HEADER, PREFILL_HEADER, request_id_of
from prfaas.router.openai.request import PARAMS_FIELD, PATHS, RESPONSES_PATH, parse_object
from prfaas.router.openai.tokenizer import Tokenizer
from prfaas.router.routing.record import RequestRecord
from prfaas.router.routing.serve import stream_response
from prfaas.router.server import engine_session, follow_certificates, serve_app
from prfaas.router.sidecar.config import PrefillScheme, SidecarConfig
from prfaas.router.sidecar.handover import Handover, SidecarRequest
from prfaas.router.sidecar.prefill_host import AllowList, PrefillHostRefused, named_host
from prfaas.transport.net.tls_proxy import tls_proxy_for
from prfaas.types import AgentName, ClusterName, InstanceId, InstanceRole

HANDED_OVER = (*PATHS.values(), RESPONSES_PATH)
REFUSED_FIELDS = (PARAMS_FIELD,)  # a salt may have been written by the picker before it


class Sidecar:
    """The state behind the routes."""

    def __init__(self, config: SidecarConfig, *, handover: Handover, passing: Proxy) -> None:
        """
        Raises:
            ConfigError: `prefill_hosts` has an entry that is no network.
        """
        self._config = config
        self._handover = handover
        self._passing = passing
        self._allowed = AllowList(config.prefill_hosts)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Prefilled where the header says; by the engine itself without one."""
        host = named_host(request.headers.getall(PREFILL_HEADER, []), sample=self._config.prefill_sampling)
        if host is None:
            metrics.SIDECAR_REQUESTS.labels(outcome="local").inc()
            return await self.pass_on(request)
        try:
            self._allowed.check(host)
            async with asyncio.timeout(self._config.request_timeout):
                return await self._hand_over(request, host)
        except PrefillHostRefused as error:
            metrics.SIDECAR_REQUESTS.labels(outcome="refused").inc()
            return error_response(403, str(error), kind="permission_error")
        except REFUSALS as error:
            return refused(error, max_body_bytes=self._config.max_body_bytes)
        except TimeoutError:
            return error_response(504, f"no answer within {self._config.request_timeout:g} s", kind="timeout")

    async def _hand_over(self, request: web.Request, host: str) -> web.StreamResponse:
        raw = await request.read()
        record = RequestRecord(request_id_of(request.headers.get("x-request-id")))
        headers = {"Content-Type": "application/json", "X-Request-Id": record.request_id}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        body = parse_object(raw, refused=REFUSED_FIELDS)
        asked = SidecarRequest(request.path, raw, body, headers, request.headers.get(GRANT_HEADER, ""))
        prefill = prefill_instance(host, scheme=self._config.prefill_scheme)
        opened = await self._handover.open(asked, prefill)
        try:
            return await stream_response(request, opened, record)
        finally:
            await opened.close()

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Return the engine's own answer to whatever it is."""
        try:
            async with asyncio.timeout(self._config.request_timeout):
                return await self._passing.pass_on(request)
        except REFUSALS as error:
            return refused(error, max_body_bytes=self._config.max_body_bytes)
        except TimeoutError:
            return error_response(504, f"no answer within {self._config.request_timeout:g} s", kind="timeout")


def prefill_instance(host_port: str, *, scheme: PrefillScheme) -> Instance:
    """Return the engine that a header names."""
    return _instance(host_port, f"{scheme}://{host_port}", role="prefill")


def decode_instance(url: str) -> Instance:
    """Return the engine beside the sidecar."""
    return _instance("engine", url, role="decode")


def _instance(name: str, url: str, *, role: InstanceRole) -> Instance:
    address = InstanceAddress(InstanceId(name), url, role, AgentName(""), "", ClusterName(""), "pd")
    return Instance(address, healthy=True)


def make_app(sidecar: Sidecar, *, max_body_bytes: int) -> web.Application:
    """Return the routes of one sidecar."""
    app = web.Application(client_max_size=max_body_bytes)
    for path in HANDED_OVER:
        app.router.add_post(path, sidecar.complete)
    app.router.add_route("*", "/{path:.*}", sidecar.pass_on)
    return app


_log = logs.get("sidecar")
Port = Literal["listen", "status_listen"]
_PASSED_HEADERS = ("Content-Type", "Accept", "Authorization", "X-Request-Id")


async def serve(config: SidecarConfig) -> None:
    """Serve until cancelled.

    Raises:
        ConfigError: an address cannot be bound, or `prefill_hosts` has an entry that is no network.
    """
    async with open_sidecar(config) as address, _guarded(_status_app(), config, "status_listen"):
        _log.info("sidecar.started", listen=address, engine=config.engine_url, protocol=config.protocol)
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def open_sidecar(config: SidecarConfig) -> AsyncIterator[str]:
    """The host:port where the sidecar answers as long as the block runs.

    Raises:
        ConfigError: it cannot be bound, or the certificates cannot be used.
    """
    certificates = config.certificates(speaks=()) if config.engine_tls == "deployment" else None
    async with engine_session("", certificates) as session, follow_certificates(certificates):
        app = make_app(_sidecar(config, session), max_body_bytes=config.max_body_bytes)
        async with _guarded(app, config, "listen") as address:
            yield address


@contextlib.asynccontextmanager
async def _guarded(app: web.Application, config: SidecarConfig, setting: Port) -> AsyncIterator[str]:
    """The host:port where an app answers; beyond loopback to certificates of the deployment, unless plain text is meant."""
    listen: str = getattr(config, setting)
    door = tls_proxy_for(
        listen,
        config.certificates(speaks=("http/1.1",)),
        setting=setting,
        allows_plaintext=config.insecure_plaintext,
        refused=lambda reason: metrics.SIDECAR_TLS_REFUSALS.labels(port=setting, reason=reason).inc(),
    )
    async with serve_app(app, listen, setting=setting, door=door) as address:
        yield address


def _sidecar(config: SidecarConfig, session: aiohttp.ClientSession) -> Sidecar:
    engine = decode_instance(config.engine_url)
    legs = LegClient(session, prefill_seconds=config.prefill_timeout)
    handover = Handover(config, engine, legs, Tokenizer(session))
    passing = Proxy(lambda model: engine, session, _PASSED_HEADERS, REFUSED_FIELDS)
    return Sidecar(config, handover=handover, passing=passing)


def _status_app() -> web.Application:
    app = web.Application()
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/metrics", _metrics)
    return app


async def _healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(body=generate_latest(), content_type="text/plain", charset="utf-8")
