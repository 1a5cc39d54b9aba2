"""Server of the sidecar: hands requests with a prefill header over, and forwards all others to the engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from prfaas import logs, metrics
from prfaas.router.engines.fleet import Instance, InstanceAddress
from prfaas.router.engines.legs import EngineResponse, LegClient, LegFailed
from prfaas.router.engines.usage import HandedOverResponse, cached_tokens
from prfaas.router.http.app import REFUSALS, error_response, metrics_response, refusal_response, timeout_response
from prfaas.router.http.proxy import Proxy
from prfaas.router.openai.headers import GRANT_HEADER, PREFILL_HEADER, request_id_of
from prfaas.router.openai.request import (
    ENDPOINTS,
    MAX_BODY_BYTES,
    MESSAGES_PATH,
    PARAMS_FIELD,
    PATHS,
    RESPONSES_PATH,
    ParsedRequest,
    nixl_prefill_body,
    parse_object,
    with_transfer_params,
)
from prfaas.router.openai.tokenizer import Tokenizer
from prfaas.router.routing.record import RequestRecord
from prfaas.router.routing.serve import stream_response
from prfaas.router.server import engine_session, follow_certificates, serve_app
from prfaas.router.sidecar.config import SidecarConfig
from prfaas.router.sidecar.prefill_host import AllowList, PrefillHostRefused, named_host
from prfaas.transport.net.tls import Certificates
from prfaas.transport.net.tls_proxy import tls_proxy_for
from prfaas.types import AgentName, ClusterName, InstanceId, InstanceRole

PREFILL_SECONDS = 120.0
REQUEST_SECONDS = 600.0
REFUSED_FIELDS = (PARAMS_FIELD,)  # The endpoint picker in front may have written a salt.
_FORWARDED_HEADERS = ("Content-Type", "Accept", "Authorization")
Port = Literal["listen", "status_listen"]
_log = logs.get("sidecar")


class Sidecar:
    """Handlers of the routes."""

    def __init__(self, config: SidecarConfig, session: aiohttp.ClientSession) -> None:
        """Prepare the sidecar's engine.

        Raises:
            ConfigError: `prefill_hosts` has an entry that is no network.
        """
        self._engine = _instance("engine", config.engine_url, role="decode")
        self._scheme = urlsplit(config.engine_url).scheme
        self._protocol = config.protocol
        self._legs = LegClient(session, prefill_seconds=PREFILL_SECONDS)
        self._tokenizer = Tokenizer(session)
        self._proxy = Proxy(lambda model, tenant: self._engine, self._legs, _FORWARDED_HEADERS, REFUSED_FIELDS)
        self._allowed = AllowList(config.prefill_hosts)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion: the engine in the header prefills it, or without a header the sidecar's own engine."""
        host = named_host(request.headers.getall(PREFILL_HEADER, []))
        if host is None:
            metrics.SIDECAR_REQUESTS.labels(outcome="local").inc()
            return await self.forward(request)
        try:
            self._allowed.check(host)
            async with asyncio.timeout(REQUEST_SECONDS):
                return await self._hand_over(request, host)
        except PrefillHostRefused as error:
            metrics.SIDECAR_REQUESTS.labels(outcome="refused").inc()
            return error_response(403, str(error), kind="permission_error")
        except REFUSALS as error:
            return refusal_response(error)
        except TimeoutError:
            return timeout_response(REQUEST_SECONDS)

    async def _hand_over(self, request: web.Request, host: str) -> web.StreamResponse:
        """Answer with the decode engine's response. It computes the prompt itself if the hand-over fails."""
        raw = await request.read()
        record = RequestRecord(request_id_of(request.headers.get("x-request-id")))
        headers = {"Content-Type": "application/json", "X-Request-Id": record.request_id}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        body = parse_object(raw, refused=REFUSED_FIELDS)
        prefill = _instance(host, f"{self._scheme}://{host}", role="prefill")
        try:
            if self._protocol == "prfaas":
                grant = request.headers.get(GRANT_HEADER, "")
                response = await self._send_both(prefill, request.path, raw, body, headers, grant=grant)
            else:
                response = await self._send_nixl(prefill, request.path, raw, body, headers)
            metrics.SIDECAR_REQUESTS.labels(outcome="disaggregated").inc()
        except LegFailed as failure:
            if failure.reason == "decode_unreachable":
                metrics.SIDECAR_REQUESTS.labels(outcome="failed").inc()
                raise
            _log.warning("prefill.failed", prefill=host, reason=failure.reason, message=str(failure))
            failure.without_traceback()
            metrics.SIDECAR_REQUESTS.labels(outcome="fell_back").inc()
            response = await self._legs.decode(self._engine, request.path, raw, headers)
        return await stream_response(request, response, record)

    async def _send_nixl(
        self, prefill: Instance, path: str, raw: bytes, body: dict[str, Any], headers: Mapping[str, str]
    ) -> EngineResponse:
        """Send the prefill leg, and then the decode leg."""
        kept = nixl_prefill_body(path, body)
        params, answer = await self._legs.prefill(prefill, kept, headers, path=path, is_nixl=True)
        response = await self._legs.decode(self._engine, path, with_transfer_params(raw, params), headers)
        return HandedOverResponse.of(response, cached_tokens(answer)) if path != RESPONSES_PATH else response

    async def _send_both(
        self, prefill: Instance, path: str, raw: bytes, body: dict[str, Any], headers: Mapping[str, str], *, grant: str
    ) -> EngineResponse:
        """Send both legs at once, over one list of token ids, under the gateway's grant."""
        endpoint = ENDPOINTS.get(path)
        if not grant or endpoint is None:
            reason = "x-prfaas-grant is missing" if endpoint else f"{path} cannot be handed over"
            raise LegFailed("prefill", "prefill_without_transfer", reason)
        parsed = ParsedRequest(endpoint, body, raw)
        prompt = None if parsed.obstacle() else await self._tokenizer.token_ids(self._engine, parsed)
        if prompt is None or len(prompt) < 2:
            raise LegFailed("prefill", "prefill_without_transfer", "one list of token ids cannot name its KV")
        prefill_body = parsed.prefill_body(prompt, grant, promised_tokens=0)
        decode_body = parsed.decode_body(prompt, grant)
        return await self._legs.both(
            asyncio.create_task(self._legs.prefill(prefill, prefill_body, headers)),
            asyncio.create_task(self._legs.decode(self._engine, path, decode_body, headers)),
        )

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Forward any other request to the engine."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                record = RequestRecord(request_id_of(request.headers.get("x-request-id")))
                answer = await self._proxy.open(request, await request.read(), record)
                return await stream_response(request, answer, record)
        except REFUSALS as error:
            return refusal_response(error)
        except TimeoutError:
            return timeout_response(REQUEST_SECONDS)

    def app(self) -> web.Application:
        """Return the routes."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        handed_over = (MESSAGES_PATH,) if self._protocol == "nixl" else ()
        for path in (*PATHS.values(), RESPONSES_PATH, *handed_over):
            app.router.add_post(path, self.complete)
        app.router.add_route("*", "/{path:.*}", self.forward)
        return app


def _instance(name: str, url: str, *, role: InstanceRole) -> Instance:
    address = InstanceAddress(InstanceId(name), url, role, AgentName(""), "", ClusterName(""), "pd")
    return Instance(address, healthy=True)


async def serve(config: SidecarConfig) -> None:
    """Serve until cancelled.

    Raises:
        ConfigError: an address cannot be bound, or `prefill_hosts` has an entry that is no network.
    """
    async with open_sidecar(config) as address, _serve_port(_status_app(), config, "status_listen"):
        _log.info("sidecar.started", listen=address, engine=config.engine_url, protocol=config.protocol)
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def open_sidecar(config: SidecarConfig) -> AsyncIterator[str]:
    """Serve the gateway while the block runs, and yield the address (host:port).

    Raises:
        ConfigError: the address cannot be bound, or the certificates are unusable.
    """
    certificates = Certificates.of(config.tls) if config.engine_tls == "deployment" else None
    async with (
        engine_session("", certificates) as session,
        follow_certificates(certificates),
        _serve_port(Sidecar(config, session).app(), config, "listen") as address,
    ):
        yield address


@contextlib.asynccontextmanager
async def _serve_port(app: web.Application, config: SidecarConfig, setting: Port) -> AsyncIterator[str]:
    """Serve an app; beyond loopback only with certificates of the deployment, unless plain text is allowed."""
    listen: str = getattr(config, setting)
    proxy = tls_proxy_for(
        listen,
        Certificates.of(config.tls, alpn_protocols=("http/1.1",)),
        setting=setting,
        allows_plaintext=config.insecure_plaintext,
        refused=lambda reason: metrics.SIDECAR_TLS_REFUSALS.labels(port=setting, reason=reason).inc(),
    )
    async with serve_app(app, listen, drain_seconds=REQUEST_SECONDS, setting=setting, proxy=proxy) as address:
        yield address


def _status_app() -> web.Application:
    app = web.Application()
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/metrics", _metrics)
    return app


async def _healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _metrics(request: web.Request) -> web.Response:
    return metrics_response()
