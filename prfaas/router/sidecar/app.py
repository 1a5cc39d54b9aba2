"""The sidecar's routes: completions with a prefill header are handed over, everything else is the engine's."""

from __future__ import annotations

import asyncio

from aiohttp import web

from prfaas import metrics
from prfaas.router.engines.fleet import Instance, InstanceAddress
from prfaas.router.http.app import REFUSALS, error_response, refused
from prfaas.router.http.proxy import Passing
from prfaas.router.openai.headers import GRANT_HEADER, PREFILL_HEADER, request_id_of
from prfaas.router.openai.request import PARAMS_FIELD, PATHS, parse_object
from prfaas.router.routing.nixl import RESPONSES_PATH
from prfaas.router.routing.record import Record
from prfaas.router.routing.serve import pass_answer_on
from prfaas.router.sidecar.config import PrefillScheme, SidecarConfig
from prfaas.router.sidecar.prefill_decode import Asked, Handover
from prfaas.router.sidecar.prefill_host import AllowList, PrefillHostRefused, named_host
from prfaas.types import AgentName, ClusterName, InstanceId, InstanceRole

HANDED_OVER = (*PATHS.values(), RESPONSES_PATH)
REFUSED_FIELDS = (PARAMS_FIELD,)  # a salt may have been written by the picker before it


class Sidecar:
    """The state behind the routes."""

    def __init__(self, config: SidecarConfig, *, handover: Handover, passing: Passing) -> None:
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
        record = Record(request_id_of(request.headers.get("x-request-id")))
        headers = {"Content-Type": "application/json", "X-Request-Id": record.request_id}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        body = parse_object(raw, refused=REFUSED_FIELDS)
        asked = Asked(request.path, raw, body, headers, request.headers.get(GRANT_HEADER, ""))
        prefill = prefill_instance(host, scheme=self._config.prefill_scheme)
        opened = await self._handover.open(asked, prefill)
        try:
            return await pass_answer_on(request, opened, record)
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
