"""Real Envoy in front of paced engines, with the endpoint picker, and a sidecar at the decode engine."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.router.config import ClusterConfig, InstanceConfig
from prfaas.router.ext_proc.server import open_picker
from prfaas.router.server import open_router
from prfaas.router.sidecar.config import SidecarConfig
from prfaas.router.sidecar.server import open_sidecar
from prfaas.types import ClusterKind, InstanceRole
from tests.support.paced_engine import PacedEngine, running
from tests.support.router import SECRET, RunningRouter, router_config
from tests.support.waiting import PATIENCE_SECONDS, until
from tools.free_ports import free_address
from tools.processes import Child, Children

EXTENSIONS = "type.googleapis.com/envoy.extensions"


@dataclass
class Gateway(RunningRouter):
    """Deployment behind Envoy. `url` is Envoy's, `router_url` that of the router which answers Envoy."""

    router_url: str = ""
    picker: str = ""


@contextlib.asynccontextmanager
async def make_gateway(directory: Path, **settings: Any) -> AsyncIterator[Gateway]:
    """Envoy, once a request finds its way."""
    east = PacedEngine()
    west = PacedEngine(prefilled_by=[east])
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(running(east, west))
        beside = SidecarConfig(listen="127.0.0.1:0", engine_url=west.url, protocol="prfaas")
        sidecar = await stack.enter_async_context(open_sidecar(beside))
        picker, front = free_address(), free_address()
        clusters = (
            _cluster("east", "prfaas", "prefill", east.url),
            _cluster("west", "pd", "both", f"http://{sidecar}"),
        )
        config = router_config(clusters=clusters, ext_proc_listen=picker, **settings)
        router = await stack.enter_async_context(open_router(config, SECRET, picker=open_picker))
        children = stack.enter_context(Children(directory))
        started = start_envoy(children, directory, front=front, picker=picker)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        gateway = Gateway(f"http://{front}", [east], [west], session, f"http://{router}", picker)
        await until(lambda: west.num_probes > 0, what="the router's probe")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await _answers(session, f"http://{front}/v1/models"):
                assert started.is_alive(), started.tail()
                await asyncio.sleep(0.02)
        yield gateway


def start_envoy(children: Children, directory: Path, *, front: str, picker: str) -> Child:
    """Envoy at `front`, which asks the endpoint picker at `picker`."""
    written = directory / "envoy.json"
    written.write_text(json.dumps(_envoy(front, picker)))
    envoy = str(Path(sys.executable).parent / "envoy")
    flags = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "warning")
    return children.start("envoy", [envoy, "-c", str(written), *flags])


def _cluster(name: str, kind: ClusterKind, role: InstanceRole, url: str) -> ClusterConfig:
    instance = InstanceConfig(name=f"{name}/0", url=url, role=role, agent=f"agent-{name}-0", wire="127.0.0.1:7400")
    return ClusterConfig(name=name, kind=kind, instances=(instance,))


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status in (200, 401)
    except aiohttp.ClientError:
        return False


def _envoy(front: str, picker: str) -> dict[str, Any]:
    """Envoy's bootstrap: every request goes where the picker's header says."""
    modes = {
        "request_header_mode": "SEND",
        "response_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_trailer_mode": "SEND",
    }
    asks_picker = {
        "@type": f"{EXTENSIONS}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "600s"},
        "processing_mode": modes,
        "message_timeout": "60s",
        "mutation_rules": {"allow_all_routing": True},
    }
    connections = {
        "@type": f"{EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "http_protocol_options": {"enable_trailers": True},
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "picked", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": asks_picker},
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{EXTENSIONS}.filters.http.router.v3.Router"},
            },
        ],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": connections}]}
    by_header = {"use_http_header": True, "http_header_name": "x-gateway-destination-endpoint"}
    http2 = {
        "@type": f"{EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "static_resources": {
            "listeners": [{"name": "front", "address": _address(front), "filter_chains": [chain]}],
            "clusters": [
                {
                    "name": "picked",
                    "type": "ORIGINAL_DST",
                    "lb_policy": "CLUSTER_PROVIDED",
                    "original_dst_lb_config": by_header,
                },
                {
                    "name": "picker",
                    "type": "STATIC",
                    "typed_extension_protocol_options": {
                        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2
                    },
                    "load_assignment": {
                        "cluster_name": "picker",
                        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(picker)}}]}],
                    },
                },
            ],
        }
    }


def _address(host_port: str) -> dict[str, Any]:
    host, _, port = host_port.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}
