"""Serves the front door on its address until it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from prfaas import logs
from prfaas.errors import ConfigError
from prfaas.router.app import Router, make_app
from prfaas.router.config import RouterConfig
from prfaas.router.deciding import Deciding
from prfaas.router.fleet import Fleet
from prfaas.router.manager_link import ManagerLink
from prfaas.units import split_address

CONNECT_SECONDS = 5.0
DRAIN_SECONDS = 10.0  # answers under way when the router is told to stop
_log = logs.get("router")


async def serve(config: RouterConfig, secret: bytes) -> None:
    """Serve until cancelled.

    Raises:
        ConfigError: the address cannot be bound.
    """
    async with _probed_router(config, secret) as router:
        app = make_app(router, max_body_bytes=config.max_body_bytes)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=DRAIN_SECONDS)
        await runner.setup()
        host, port = split_address(config.listen)
        try:
            await web.TCPSite(runner, host, port).start()
            _log.info("router.started", listen=config.listen, threshold_tokens=config.threshold_tokens)
            await asyncio.Event().wait()
        except OSError as error:
            raise ConfigError(f"listen: {config.listen} cannot be bound ({error.strerror})") from error
        finally:
            await runner.cleanup()
            _log.info("router.stopped")


@contextlib.asynccontextmanager
async def _probed_router(config: RouterConfig, secret: bytes) -> AsyncIterator[Router]:
    """A router whose fleet is kept up to date as long as the block runs."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        fleet = Fleet(config, session)
        manager = ManagerLink(config, secret, fleet) if config.managers else None
        watches = [asyncio.create_task(fleet.probe_forever())]
        if manager is not None:
            watches.append(asyncio.create_task(manager.watch_forever()))
        try:
            yield Router(config, fleet=fleet, deciding=Deciding(config, secret, fleet, manager), session=session)
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            if manager is not None:
                await manager.close()
