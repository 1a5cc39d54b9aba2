"""A router before paced engines, over real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client import REGISTRY

from prfaas.router.config import ClusterConfig, InstanceConfig, RouterConfig
from prfaas.router.server import OpenPicker, open_router
from prfaas.types import ClusterKind, InstanceRole
from tests.support.paced_engine import MODEL, PacedEngine, running, streamed
from tests.support.secret_files import write_secret
from tests.support.waiting import PATIENCE_SECONDS

SECRET = b"s" * 32
OPERATOR_KEY = "key-of-operators"
T = 200
SHORT, LONG = "x" * 20, "y" * (T + 1)
STREAMED = b"".join(map(streamed, "abc")) + b"data: [DONE]\n\n"
STREAMED_CHAT = b"".join(streamed(text, chat=True) for text in "abc") + b"data: [DONE]\n\n"


def counted_requests(status: int, route: str, outcome: str) -> float:
    """Return the requests that this process's routers have counted with these labels."""
    labels = {"status": str(status), "route": route, "outcome": outcome}
    return REGISTRY.get_sample_value("prfaas_router_requests_total", labels) or 0.0


@dataclass
class RunningRouter:
    """A router before prefill and decode engines."""

    url: str
    easts: Sequence[PacedEngine]
    wests: Sequence[PacedEngine]
    session: aiohttp.ClientSession
    operator: Mapping[str, str] = field(default_factory=dict, kw_only=True)  # Headers that open the router's own pages.
    clusters: tuple[ClusterConfig, ...] = field(default=(), kw_only=True)

    @property
    def east(self) -> PacedEngine:
        return self.easts[0]

    @property
    def west(self) -> PacedEngine:
        return self.wests[0]

    async def post(
        self, body: dict[str, Any], *, path: str = "/v1/completions", **headers: str
    ) -> tuple[int, bytes, Any]:
        """Status, body and headers of an answer."""
        async with self.session.post(self.url + path, json={"model": MODEL, **body}, headers=headers) as response:
            return response.status, await response.read(), response.headers

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        async with self.session.get(self.url + path, headers=self.operator) as response:
            return response.status, await response.json()

    async def decided(self, prompt: list[int], **headers: str) -> dict[str, Any]:
        """Ask for a completion, and return the record of its decision."""
        _, _, answered = await self.post({"prompt": prompt, "max_tokens": 64}, **headers)
        record: dict[str, Any] = (await self.get(f"/debug/decision/{answered['x-request-id']}"))[1]
        return record

    async def status(self, path: str, headers: Mapping[str, str]) -> int:
        """Status of an answer."""
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status

    async def health(self) -> dict[str, bool]:
        """Return which instances the router takes for healthy, east/0 as east_0."""
        states: dict[str, bool] = (await self.get("/health"))[1]["instances"]
        return {name.replace("/", "_"): healthy for name, healthy in states.items()}

    async def until_health(self, **wanted: bool) -> None:
        """Wait until the router sees these instances so."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not wanted.items() <= (await self.health()).items():  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running_router(
    *,
    num_easts: int = 1,
    num_wests: int = 1,
    one_cluster: bool = False,
    picker: OpenPicker | None = None,
    **settings: Any,
) -> AsyncIterator[RunningRouter]:
    """A router whose engines are all seen to be healthy; the easts prefill for the wests, from a cluster of their own or
    as PD-P instances of theirs.
    """
    easts = [PacedEngine() for _ in range(num_easts)]
    wests = [PacedEngine(prefilled_by=easts) for _ in range(num_wests)]
    async with running(*easts, *wests):
        prefilling, decoding = _instances("east", "prefill", easts), _instances("west", "both", wests)
        apart = (_cluster("east", "prfaas", prefilling), _cluster("west", "pd", decoding))
        clusters = (_cluster("west", "pd", [*prefilling, *decoding]),) if one_cluster else apart
        operator, of_operators = operators_beside(settings.get("api_keys_file"))
        config = router_config(clusters=clusters, **settings, **of_operators)
        async with aiohttp.ClientSession() as session, open_router(config, SECRET, picker=picker) as address:
            router = RunningRouter(
                f"http://{address}", easts, wests, session, operator=operator, clusters=config.clusters
            )
            names = [f"east_{n}" for n in range(num_easts)] + [f"west_{n}" for n in range(num_wests)]
            await router.until_health(**dict.fromkeys(names, True))
            yield router


def operators_beside(clients: Path | None) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the headers of operators where clients have keys, and the router's setting for it."""
    if clients is None:
        return {}, {}
    file = write_secret(clients.with_name("operators"), OPERATOR_KEY)
    return {"Authorization": f"Bearer {OPERATOR_KEY}"}, {"operator_keys_file": file}


def router_config(**settings: Any) -> RouterConfig:
    """Return a router on a free port; without `clusters` before an engine that is not there."""
    nowhere = InstanceConfig(name="w", url="http://127.0.0.1:1", role="both", agent="w", wire="127.0.0.1:1")
    defaults: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "threshold_tokens": T,
        "probe_interval": 0.1,
        "silence_seconds": PATIENCE_SECONDS,  # On a busy machine engines of this process answer late.
        "clusters": (ClusterConfig(name="west", kind="pd", instances=(nowhere,)),),
    }
    return RouterConfig(secret_file="-", **(defaults | settings))


def _cluster(name: str, kind: ClusterKind, instances: Sequence[InstanceConfig]) -> ClusterConfig:
    return ClusterConfig(name=name, kind=kind, instances=tuple(instances))


def _instances(name: str, role: InstanceRole, engines: Sequence[PacedEngine]) -> list[InstanceConfig]:
    return [
        InstanceConfig(
            name=f"{name}/{number}", url=engine.url, role=role, agent=f"agent-{name}-{number}", wire="127.0.0.1:7400"
        )
        for number, engine in enumerate(engines)
    ]
