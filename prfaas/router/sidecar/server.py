"""Serves one sidecar, and its own metrics, until it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web
from prometheus_client import generate_latest

from prfaas import logs
from prfaas.router.legs import Legs
from prfaas.router.passing import Passing
from prfaas.router.server import engine_session, listening
from prfaas.router.sidecar.app import Sidecar, decode_instance, make_app
from prfaas.router.sidecar.config import SidecarConfig
from prfaas.router.sidecar.handover import Handover
from prfaas.router.tokens import Tokenizer

_log = logs.get("sidecar")
_PASSED_HEADERS = ("Content-Type", "Accept", "Authorization", "X-Request-Id")


async def serve(config: SidecarConfig) -> None:
    """Serve until cancelled.

    Raises:
        ConfigError: an address cannot be bound, or `prefill_hosts` has an entry that is no network.
    """
    async with open_sidecar(config) as address, listening(_status_app(), config.status_listen, setting="status_listen"):
        _log.info("sidecar.started", listen=address, engine=config.engine_url, protocol=config.protocol)
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def open_sidecar(config: SidecarConfig) -> AsyncIterator[str]:
    """The host:port where the sidecar answers as long as the block runs."""
    async with engine_session() as session:
        sidecar = _sidecar(config, session)
        async with listening(make_app(sidecar, max_body_bytes=config.max_body_bytes), config.listen) as address:
            yield address


def _sidecar(config: SidecarConfig, session: aiohttp.ClientSession) -> Sidecar:
    engine = decode_instance(config.engine_url)
    legs = Legs(session, prefill_seconds=config.prefill_timeout)
    handover = Handover(config, engine, legs, Tokenizer(session))
    return Sidecar(config, handover=handover, passing=Passing(lambda: engine, session, _PASSED_HEADERS))


def _status_app() -> web.Application:
    app = web.Application()
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/metrics", _metrics)
    return app


async def _healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(body=generate_latest(), content_type="text/plain", charset="utf-8")
