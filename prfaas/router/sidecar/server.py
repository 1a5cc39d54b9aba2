"""Serves one sidecar, and its own metrics, until it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Literal

import aiohttp
from aiohttp import web
from prometheus_client import generate_latest

from prfaas import logs, metrics
from prfaas.router.engines.legs import Legs
from prfaas.router.http.proxy import Passing
from prfaas.router.openai.tokenizer import Tokenizer
from prfaas.router.server import engine_session, following, listening
from prfaas.router.sidecar.app import REFUSED_FIELDS, Sidecar, decode_instance, make_app
from prfaas.router.sidecar.config import SidecarConfig
from prfaas.router.sidecar.prefill_decode import Handover
from prfaas.transport.net.tls_proxy import tls_proxy_for

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
    async with engine_session("", certificates) as session, following(certificates):
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
    async with listening(app, listen, setting=setting, door=door) as address:
        yield address


def _sidecar(config: SidecarConfig, session: aiohttp.ClientSession) -> Sidecar:
    engine = decode_instance(config.engine_url)
    legs = Legs(session, prefill_seconds=config.prefill_timeout)
    handover = Handover(config, engine, legs, Tokenizer(session))
    passing = Passing(lambda model: engine, session, _PASSED_HEADERS, REFUSED_FIELDS)
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
