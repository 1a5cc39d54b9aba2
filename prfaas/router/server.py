"""Server of the router: builds its parts, and serves clients until it is cancelled."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial

import aiohttp
from aiohttp import web

from prfaas import logs, metrics
from prfaas.errors import ConfigError
from prfaas.router.config import RouterConfig
from prfaas.router.engines.fleet import Fleet
from prfaas.router.engines.legs import LegClient
from prfaas.router.ext_proc.endpoint_choice import EndpointChooser
from prfaas.router.http.admission import OperatorKeys, RequestAdmission, Tenants, read_clients, read_key
from prfaas.router.http.app import Router, UnhandledRequests, make_app
from prfaas.router.http.budget import ClientBudget
from prfaas.router.http.limits import ClientConnections, ConnectionBudget, max_connections, raise_descriptor_limit
from prfaas.router.http.proxy import Proxy
from prfaas.router.openai.request import MAX_BODY_BYTES
from prfaas.router.openai.tokenizer import Tokenizer
from prfaas.router.routing.decide import DecisionMaker
from prfaas.router.routing.manager_client import DecisionClient
from prfaas.router.routing.record import RequestRecords
from prfaas.router.routing.serve import RequestHandler
from prfaas.rpc.tasks import cancel_tasks, restarting_task
from prfaas.transport.net.tls import Certificates
from prfaas.transport.net.tls_proxy import INNER, TlsProxy
from prfaas.types import ClusterName
from prfaas.units import join_address, split_address

CONNECT_SECONDS = 5.0
IDLE_SECONDS = 4.0  # Shorter than vLLM's 5 s, so that no request meets a connection that is being closed.
CERTIFICATE_CHECK_SECONDS = 5.0
MAX_CLIENT_HANDSHAKES = 1024
CLIENT_IDLE_SECONDS = 75.0  # Longer than the 60 s of common load balancers.
LINGER_SECONDS = 0.5  # For the rest of a refused body, so that the client reads the answer before a reset.
BACKLOG = 64  # Connections that are accepted at once, before any is refused.
# Descriptors of a client's connection with two legs; with TLS two more lead from the proxy to the server.
PLAIN_DESCRIPTORS, TLS_DESCRIPTORS = 3, 5
OpenPicker = Callable[[RouterConfig, EndpointChooser], contextlib.AbstractAsyncContextManager[str]]
_log = logs.get("router")
_restarting_task = partial(restarting_task, ended=metrics.ROUTER_TASKS_ENDED)


async def serve(config: RouterConfig, secret: bytes, *, picker: OpenPicker | None = None) -> None:
    """Serve until cancelled. `picker` opens the endpoint picker for gateways (`ext_proc/server.py`).

    Raises:
        ConfigError: the address cannot be bound.
    """
    raise_descriptor_limit()
    async with open_router(config, secret, picker=picker) as address:
        _log.info("router.started", listen=address, threshold_tokens=config.threshold_tokens)
        try:
            await asyncio.Event().wait()
        finally:
            _log.info("router.stopping", drain_seconds=config.request_timeout)


@contextlib.asynccontextmanager
async def open_router(config: RouterConfig, secret: bytes, *, picker: OpenPicker | None = None) -> AsyncIterator[str]:
    """Serve clients while the block runs, and yield the address (host:port).

    Raises:
        ConfigError: the address cannot be bound.
    """
    certificates = Certificates.of(config.client_tls, alpn_protocols=("http/1.1",))
    descriptors_each = PLAIN_DESCRIPTORS if certificates is None else TLS_DESCRIPTORS
    budget = ConnectionBudget(max_connections(config.limits, descriptors_each=descriptors_each))
    proxy: TlsProxy | None = None
    if certificates is not None:
        proxy = TlsProxy(
            config.listen,
            certificates,
            setting="listen",
            refused=lambda reason: metrics.CLIENT_TLS_REFUSALS.labels(reason=reason).inc(),
            max_handshakes=MAX_CLIENT_HANDSHAKES,
            budget=budget,
        )
    connections = ClientConnections(
        budget, header_seconds=config.limits.header_time, proxied=proxy.peer_host if proxy is not None else None
    )
    gateways, clients = contextlib.AsyncExitStack(), contextlib.AsyncExitStack()
    async with _running_router(config, secret, connections) as (router, chooser):
        try:
            if picker is not None:
                _log.info("picker.started", listen=await gateways.enter_async_context(picker(config, chooser)))
            if proxy is not None:
                proxy.bind()
            app = make_app(router, connections)
            server = serve_app(
                app, config.listen, drain_seconds=config.request_timeout, proxy=proxy, connections=connections
            )
            yield await clients.enter_async_context(server)
        finally:  # Both drain at the same time.
            await asyncio.gather(gateways.aclose(), clients.aclose())


@contextlib.asynccontextmanager
async def serve_app(
    app: web.Application,
    listen: str,
    *,
    drain_seconds: float,
    setting: str = "listen",
    proxy: TlsProxy | None = None,
    connections: ClientConnections | None = None,
) -> AsyncIterator[str]:
    """Serve an app while the block runs, and yield its address. A client that disconnects ends its request.

    Running answers have `drain_seconds` at the end. `setting` names the address in error messages.
    A `proxy` is bound already, and is closed at the end. `connections` limits those of clients; None for no limits.

    Raises:
        ConfigError: the address cannot be bound.
    """
    if proxy is None:
        async with _bound(app, listen, drain_seconds, setting, connections) as address:
            yield address
        return
    try:
        async with _bound(app, INNER, drain_seconds, setting, connections) as inner:
            proxy.start(inner)
            try:
                yield proxy.address
            finally:  # Running requests end, and new clients are refused as at a plain port.
                proxy.stop_listening()
    finally:
        await proxy.close()


@contextlib.asynccontextmanager
async def _bound(
    app: web.Application, listen: str, drain_seconds: float, setting: str, connections: ClientConnections | None
) -> AsyncIterator[str]:
    counted = {"access_log_class": UnhandledRequests} if connections is not None else {"access_log": None}
    runner = web.AppRunner(
        app,
        shutdown_timeout=drain_seconds,
        handler_cancellation=True,
        keepalive_timeout=CLIENT_IDLE_SECONDS,
        lingering_time=LINGER_SECONDS,
        **counted,
    )
    await runner.setup()
    assert runner.server is not None, "`setup` makes the server"
    protocols = connections.wrap(runner.server) if connections is not None else runner.server
    host, port = split_address(listen)
    try:
        try:
            server = await asyncio.get_running_loop().create_server(protocols, host, port, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"{setting}: {listen} cannot be bound ({error.strerror})") from error
        try:
            yield join_address(host, int(server.sockets[0].getsockname()[1]))
        finally:
            server.close()
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _running_router(
    config: RouterConfig, secret: bytes, connections: ClientConnections
) -> AsyncIterator[tuple[Router, EndpointChooser]]:
    """Run the background tasks of a router, and yield it together with its endpoint picker."""
    keys = read_clients(config.api_keys_file, setting="api_keys_file")
    operator_keys = read_clients(config.operator_keys_file, setting="operator_keys_file")
    operators = OperatorKeys(operator_keys, clients_are_known=bool(keys) or config.client_tls.authority is not None)
    limits = config.limits
    admission = RequestAdmission(keys, max_requests=config.max_requests, tenants=Tenants.of_config(config))
    engine_key = read_key(config.engine_api_key_file, setting="engine_api_key_file")
    certificates = Certificates.of(config.tls) if config.engine_tls == "deployment" else None
    async with engine_session(engine_key, certificates) as session, follow_certificates(certificates):
        fleet = Fleet(config, session)
        manager = DecisionClient(config, secret, fleet) if config.managers else None
        tasks = [_restarting_task(fleet.probe_forever, name="fleet probe")]
        tasks.append(_restarting_task(connections.watch_forever, name="late headers"))
        if manager is not None:
            tasks.append(_restarting_task(manager.watch_forever, name="manager watch"))
            tasks.append(_restarting_task(manager.reports.send_forever, name="manager report"))
        legs = LegClient(session, prefill_seconds=config.transfer_deadline)
        handler = RequestHandler(
            fleet=fleet,
            decisions=DecisionMaker(config, secret, fleet, manager),
            legs=legs,
            tokenizer=Tokenizer(session),
            pd_protocol=config.pd_protocol,
            cluster=ClusterName(config.cluster),
            has_overflow=config.overflow,
            clusters_of_tenants=config.clusters_of_tenants(),
        )
        records = RequestRecords()
        try:
            router = Router(
                fleet=fleet,
                handler=handler,
                proxy=Proxy(fleet.any_decode, legs),
                admission=admission,
                operators=operators,
                records=records,
                manager=manager,
                request_timeout=config.request_timeout,
                connections=connections,
                bodies=ClientBudget("body_bytes", limits.body_bytes, least=MAX_BODY_BYTES),
                body_seconds=limits.body_time,
            )
            yield router, EndpointChooser(fleet, handler, admission, records)
        finally:
            await cancel_tasks(tasks)
            if manager is not None:
                await manager.close()


@contextlib.asynccontextmanager
async def follow_certificates(certificates: Certificates | None) -> AsyncIterator[None]:
    """Let connections to engines use renewed certificate files while the block runs."""
    if certificates is None:
        yield
        return
    task = _restarting_task(partial(_reload_certificates, certificates), name="certificates")
    try:
        yield
    finally:
        await cancel_tasks([task])


async def _reload_certificates(certificates: Certificates) -> None:
    while True:
        await asyncio.sleep(CERTIFICATE_CHECK_SECONDS)
        certificates.shared_client_context()


def engine_session(key: str = "", certificates: Certificates | None = None) -> aiohttp.ClientSession:
    """Return the session for engines, with the key that they require and without a limit on connections.

    At https URLs it shows `certificates` and trusts their authority. Without certificates it trusts the system's authorities.
    """
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        connector=aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=IDLE_SECONDS,
            ssl=True if certificates is None else certificates.shared_client_context(),
        ),
        cookie_jar=aiohttp.DummyCookieJar(),  # Cookies of one client must not reach another.
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )
