"""Serves the front door on its address until it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import aiohttp
from aiohttp import web

from prfaas import logs, metrics
from prfaas.errors import ConfigError
from prfaas.router.config import RouterConfig
from prfaas.router.engines.discovery import Discovery
from prfaas.router.engines.fleet import Fleet
from prfaas.router.engines.legs import LegClient
from prfaas.router.ext_proc.endpoint_choice import EndpointChooser
from prfaas.router.http.admission import OperatorKeys, Quotas, RequestAdmission, read_clients, read_key
from prfaas.router.http.app import Router, make_app
from prfaas.router.http.proxy import Proxy
from prfaas.router.openai.tokenizer import Tokenizer
from prfaas.router.routing.decide import DecisionMaker
from prfaas.router.routing.manager_client import DecisionClient
from prfaas.router.routing.record import RequestRecords
from prfaas.router.routing.serve import RequestHandler
from prfaas.rpc.tasks import cancel_tasks, restarting_task
from prfaas.transport.net.tls import Certificates
from prfaas.transport.net.tls_proxy import INNER, TlsProxy
from prfaas.units import join_address, split_address

CONNECT_SECONDS = 5.0
IDLE_SECONDS = 4.0  # vLLM closes idle connections after 5 s; a request must not meet that moment
CERTIFICATE_LOOK_SECONDS = 5.0
DRAIN_SECONDS = 10.0  # answers under way when the router is told to stop
MAX_CLIENT_STRANGERS = 1024  # TLS handshakes under way with clients, who may be anybody
OpenPicker = Callable[[RouterConfig, EndpointChooser], contextlib.AbstractAsyncContextManager[str]]
_log = logs.get("router")


async def serve(config: RouterConfig, secret: bytes, *, picker: OpenPicker | None = None) -> None:
    """Serve until cancelled; `picker` answers gateways (`ext_proc/server.py`).

    Raises:
        ConfigError: the address cannot be bound.
    """
    async with open_router(config, secret, picker=picker) as address:
        _log.info("router.started", listen=address, threshold_tokens=config.threshold_tokens)
        try:
            await asyncio.Event().wait()
        finally:
            _log.info("router.stopping")


@contextlib.asynccontextmanager
async def open_router(config: RouterConfig, secret: bytes, *, picker: OpenPicker | None = None) -> AsyncIterator[str]:
    """The host:port where the front door answers as long as the block runs.

    Raises:
        ConfigError: the address cannot be bound.
    """
    async with _running_router(config, secret) as (router, choosing), contextlib.AsyncExitStack() as stack:
        if picker is not None:
            _log.info("picker.started", listen=await stack.enter_async_context(picker(config, choosing)))
        app = make_app(router, max_body_bytes=config.max_body_bytes)
        yield await stack.enter_async_context(serve_app(app, config.listen, door=_client_door(config)))


def _client_door(config: RouterConfig) -> TlsProxy | None:
    """Before the clients' port, where there is a certificate for it; on loopback too."""
    certificates = config.client_certificates()
    if certificates is None:
        return None
    refused = metrics.CLIENT_TLS_REFUSALS
    door = TlsProxy(
        config.listen,
        certificates,
        setting="listen",
        refused=lambda reason: refused.labels(reason=reason).inc(),
        max_handshakes=MAX_CLIENT_STRANGERS,
    )
    door.bind()
    return door


@contextlib.asynccontextmanager
async def serve_app(
    app: web.Application, listen: str, *, setting: str = "listen", door: TlsProxy | None = None
) -> AsyncIterator[str]:
    """The host:port where an app answers as long as the block runs; `setting` is the address's, for messages.

    A client that leaves ends what is done for it. `door`: bound there, and the way in; it is closed at the end.

    Raises:
        ConfigError: the address cannot be bound.
    """
    if door is None:
        async with _serving(app, listen, setting) as address:
            yield address
        return
    try:
        async with _serving(app, INNER, setting) as inner:
            door.start(inner)
            try:
                yield door.address
            finally:  # what is under way ends, and whoever comes now is refused as at a plain port
                door.stop_listening()
    finally:
        await door.close()


@contextlib.asynccontextmanager
async def _serving(app: web.Application, listen: str, setting: str) -> AsyncIterator[str]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=DRAIN_SECONDS, handler_cancellation=True)
    await runner.setup()
    try:
        yield await _bind(runner, listen, setting)
    finally:
        await runner.cleanup()


async def _bind(runner: web.AppRunner, listen: str, setting: str) -> str:
    host, port = split_address(listen)
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise ConfigError(f"{setting}: {listen} cannot be bound ({error.strerror})") from error
    bound: int = runner.addresses[0][1]
    return join_address(host, bound)


@contextlib.asynccontextmanager
async def _running_router(config: RouterConfig, secret: bytes) -> AsyncIterator[tuple[Router, EndpointChooser]]:
    """A router, and its answers to gateways, whose fleet is kept up to date as long as the block runs."""
    keys = read_clients(config.api_keys_file, setting="api_keys_file")
    quotas = Quotas(config.quotas_by_client(), config.default_quota(), time.monotonic)
    operator_keys = read_clients(config.operator_keys_file, setting="operator_keys_file")
    lets_in_some = bool(keys) or config.client_tls_authority is not None
    operators = OperatorKeys(operator_keys, clients_are_known=lets_in_some)
    tenants = config.client_tenants()
    admission = RequestAdmission(keys, max_requests=config.max_requests, quotas=quotas, tenants=tenants)
    engine_key = read_key(config.engine_api_key_file, setting="engine_api_key_file")
    certificates = config.certificates(speaks=()) if config.engine_tls == "deployment" else None
    async with engine_session(engine_key, certificates) as session, follow_certificates(certificates):
        fleet = Fleet(config, session)
        manager = DecisionClient(config, secret, fleet) if config.managers else None
        watches = [restarting_task(fleet.probe_forever, name="fleet probe", ended=metrics.ROUTER_TASKS_ENDED)]
        if config.discovery.looks:
            discovery = Discovery(
                config.discovery, session=session, tls=_dialling(config), found=fleet.update, clock=time.monotonic
            )
            watches.append(
                restarting_task(discovery.watch_forever, name="discovery watch", ended=metrics.ROUTER_TASKS_ENDED)
            )
        if manager is not None:
            watches.append(
                restarting_task(manager.watch_forever, name="manager watch", ended=metrics.ROUTER_TASKS_ENDED)
            )
            watches.append(
                restarting_task(manager.report_forever, name="manager report", ended=metrics.ROUTER_TASKS_ENDED)
            )
        answering = RequestHandler(
            fleet=fleet,
            deciding=DecisionMaker(config, secret, fleet, manager),
            legs=LegClient(session, prefill_seconds=config.transfer_deadline),
            tokenizer=Tokenizer(session),
            pd_protocol=config.pd_protocol,
        )
        records = RequestRecords()
        passing = Proxy(fleet.any_decode, session)
        try:
            router = Router(
                config,
                fleet,
                answering=answering,
                passing=passing,
                admission=admission,
                operators=operators,
                records=records,
                report=manager.ended if manager is not None else lambda record: None,
            )
            yield router, EndpointChooser(fleet, answering, admission, records)
        finally:
            await cancel_tasks(watches)
            if manager is not None:
                await manager.close()


def _dialling(config: RouterConfig) -> Callable[[], ssl.SSLContext] | None:
    """How agents' encrypted pages are asked; None: they are plain."""
    certificates = config.certificates(speaks=())
    return certificates.client_context if certificates is not None else None


@contextlib.asynccontextmanager
async def follow_certificates(certificates: Certificates | None) -> AsyncIterator[None]:
    """Have the engines' connections take new files as long as the block runs."""
    watches = []
    if certificates is not None:
        watches.append(
            restarting_task(partial(_follow, certificates), name="certificates", ended=metrics.ROUTER_TASKS_ENDED)
        )
    try:
        yield
    finally:
        await cancel_tasks(watches)


async def _follow(certificates: Certificates) -> None:
    while True:
        await asyncio.sleep(CERTIFICATE_LOOK_SECONDS)
        certificates.shared_client_context()


def engine_session(key: str = "", certificates: Certificates | None = None) -> aiohttp.ClientSession:
    """Connections to the engines, as many as there are requests, with the key that the engines ask for.

    At https: URLs they show `certificates` and take those of the same authority; None: the system's authorities vouch.
    """
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        connector=aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=IDLE_SECONDS,
            ssl=True if certificates is None else certificates.shared_client_context(),
        ),
        cookie_jar=aiohttp.DummyCookieJar(),  # what an engine tells one client is not for the next
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )
