"""Router with a real manager and paced engines over real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.hashing import HashChain, root_hash
from prfaas.index.membership import Engine, Node
from prfaas.kv.layout import Layout
from prfaas.manager.daemon import Manager
from prfaas.router.config import RouterConfig
from prfaas.router.server import open_router
from prfaas.rpc.reporter import Reporter
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole
from tests.support.deployment import SECRET, Deployment, hybrid_layout, stored
from tests.support.paced_engine import MODEL, PacedEngine, running
from tests.support.router import RunningRouter, operators_beside
from tests.support.waiting import PATIENCE_SECONDS, until

T = 100
PROMPT = list(range(1, 2 * T + 1))
SETTINGS: dict[str, Any] = {
    "listen": "127.0.0.1:0",
    "secret_file": "-",
    "threshold_tokens": 9 * T,
    "probe_interval": 0.1,
    "silence_seconds": PATIENCE_SECONDS,
    "manager_timeout": PATIENCE_SECONDS,  # Long enough that managers decide even on a busy machine.
}


@dataclass
class Managed:
    """A router that knows its engines from a manager only."""

    router: RunningRouter
    manager: Manager
    deployment: Deployment
    reporters: dict[str, Reporter]
    reports: list[asyncio.Task[None]]

    async def hold(self, prompt: list[int], *, tenant: str = "") -> None:
        """Let the first decode node report a prompt's KV, as an engine leaves it that was sent this salt."""
        reporter = self.reporters["west-0"]
        before = reporter.status.acknowledged
        chain = HashChain(root_hash(MODEL, tenant.encode()), prompt)
        reporter.publish(stored(hybrid_layout(MODEL), chain, len(prompt)))
        await until(lambda: reporter.status.acknowledged > before)


@contextlib.asynccontextmanager
async def make_managed(
    directory: Path,
    *,
    router_secret: bytes = SECRET,
    num_wests: int = 1,
    one_cluster: bool = False,
    manager_settings: Mapping[str, Any] = {"threshold_tokens": T},
    with_redis: bool = False,
    layouts: tuple[Layout, ...] = (hybrid_layout(MODEL),),
    **settings: Any,
) -> AsyncIterator[Managed]:
    """Start everything, and yield it once the engines are healthy; `settings` are the router's.

    The east prefills for the wests from a cluster of its own, or as a PD-P instance of theirs.
    """
    easts = [PacedEngine()]
    wests = [PacedEngine(prefilled_by=easts) for _ in range(num_wests)]
    async with running(*easts, *wests), Deployment(directory) as deployment:
        if with_redis:
            await deployment.start_redis()
        manager = await deployment.start_manager(**manager_settings)
        kind: ClusterKind = "pd" if one_cluster else "prfaas"
        role: InstanceRole = "decode" if one_cluster else "both"
        reporters = {"east": _reporter("east", manager, kind, "prefill", easts[0], layouts)}
        for number, engine in enumerate(wests):
            reporters[f"west-{number}"] = _reporter(f"west-{number}", manager, "pd", role, engine, layouts)
        reports = [deployment.run(reporter) for reporter in reporters.values()]
        await until(
            lambda: all(reporter.status.manager for reporter in reporters.values()), what="the nodes at the manager"
        )
        operator, of_operators = operators_beside(settings.get("api_keys_file"))
        config = RouterConfig(**SETTINGS, managers=(manager.address,), **settings, **of_operators)
        async with open_router(config, router_secret) as address, aiohttp.ClientSession() as session:
            router = RunningRouter(f"http://{address}", easts, wests, session, operator=operator)
            yield Managed(router, manager, deployment, reporters, reports)


def _reporter(
    name: str, manager: Manager, kind: ClusterKind, role: InstanceRole, engine: PacedEngine, layouts: tuple[Layout, ...]
) -> Reporter:
    description = Engine(InstanceId(f"{name}/0"), engine.url, role, MODEL)
    cluster = ClusterName("east" if kind == "prfaas" else "west")
    node = Node(AgentName(name), cluster, kind, f"{name}:7400", 1, layouts, (description,))
    return Reporter((manager.address,), node=node, secret=SECRET)
