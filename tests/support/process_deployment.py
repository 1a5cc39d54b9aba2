"""Deployment of processes before paced engines: manager, routers, and an agent behind a relay per cluster."""

import asyncio
import contextlib
import functools
import itertools
import json
import math
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp

from prfaas.types import ClusterKind, InstanceRole
from tests.support.embedded_redis import kill_embedded_redis
from tests.support.secret_files import write_secret
from tools.demo.client import get_json
from tools.free_ports import free_address
from tools.link import LinkShape, Relay
from tools.paced_engine.kv import answer_tokens
from tools.processes import Child, Children
from tools.stack import AgentProcess, Stack

MODEL = "paced"
REQUEST_SECONDS = 90.0  # A slower answer counts as a hang.
CLUSTERS: Mapping[str, ClusterKind] = {"east": "prfaas", "west": "pd"}
OPERATOR_KEY = "operator"
OPERATOR = {"Authorization": f"Bearer {OPERATOR_KEY}"}
UNSHAPED = LinkShape()
_seeds = itertools.count(1)


@dataclass(frozen=True)
class Outcome:
    """One answer: its tokens, its error if it ended early, and the response headers."""

    prompt: list[int]
    token_ids: list[int]
    wanted: list[int]
    error: str
    headers: Mapping[str, str]
    ttft_seconds: float = math.inf

    @property
    def is_whole(self) -> bool:
        return not self.error and self.token_ids == self.wanted

    @property
    def is_honest(self) -> bool:
        """Return whether the tokens are correct, and an error marks an early end."""
        return self.is_whole or (bool(self.error) and self.token_ids == self.wanted[: len(self.token_ids)])

    @property
    def reason(self) -> str:
        return self.headers.get("x-prfaas-reason", "")


class ProcessDeployment:
    """Processes of one deployment."""

    def __init__(
        self, children: Children, stack: Stack, directory: Path, clusters: Mapping[str, ClusterKind] = CLUSTERS
    ) -> None:
        self.children, self._stack, self._directory = children, stack, directory
        self._clusters = clusters
        self.agents: dict[str, AgentProcess] = {}
        self.engines: dict[str, Child] = {}
        self.engine_urls: dict[str, str] = {}
        self.relays: dict[str, Relay] = {}
        self.manager: Child
        self.manager_grpc = ""
        self.manager_url = ""
        self.router_urls: dict[str, str] = {}  # Keyed by PD cluster.

    @property
    def router_url(self) -> str:
        return self.router_urls["west"]

    def start_manager(self, **settings: Any) -> None:
        settings = {"expiry_seconds": "5s", **settings}
        settings["redis_directory"] = str(self._directory / "redis")
        self.manager, self.manager_grpc, self.manager_url = self._stack.start_manager(**settings)
        self._stack.await_server(self.manager, self.manager_url, path="/healthz")

    def start_cluster(self, name: str, relay: Relay, *, wire: str, num_engines: int, flags: Sequence[str]) -> None:
        """Start an agent behind a relay, and its engines."""
        role: InstanceRole = "prefill" if self._clusters[name] == "prfaas" else "both"
        self.start_node(name, relay, cluster=name, role=role, wire=wire, num_engines=num_engines, flags=flags)

    def start_node(
        self,
        name: str,
        relay: Relay,
        *,
        cluster: str,
        role: InstanceRole,
        wire: str,
        num_engines: int = 1,
        flags: Sequence[str] = (),
        managers: Sequence[str] = (),
    ) -> None:
        """Start one agent of a cluster behind a relay, and its engines."""
        urls = {f"{name}/{number}": f"http://{free_address()}" for number in range(num_engines)}
        engines = [{"instance": instance, "url": url, "role": role, "model": MODEL} for instance, url in urls.items()]
        agent = self._stack.start_agent(
            name,
            listen=wire,
            advertise=relay.address,
            managers=[*managers] or [self.manager_grpc],
            cluster=cluster,
            cluster_kind=self._clusters[cluster],
            engines=engines,
            silence_seconds="3s",
        )
        self._stack.await_agent(agent)
        self.agents[name], self.relays[name] = agent, relay
        self.engine_urls |= urls
        for instance, url in urls.items():
            self._start_engine(instance, url, agent, flags)

    def _start_engine(self, instance: str, url: str, agent: AgentProcess, flags: Sequence[str]) -> None:
        command = self._engine_command(instance, url, agent, flags)
        self.engines[instance] = self.children.start(instance.replace("/", "-"), command)

    @staticmethod
    def _engine_command(instance: str, url: str, agent: AgentProcess, flags: Sequence[str]) -> list[str]:
        command = [sys.executable, "-m", "tools.paced_engine", "--socket", str(agent.socket), "--model", MODEL]
        return [*command, "--listen", url.removeprefix("http://"), "--instance", instance, *flags]

    def start_routers(self, **router_settings: Any) -> None:
        """Start a router per PD cluster, and wait until each sees all engines."""
        for instance, url in self.engine_urls.items():
            self._stack.await_server(self.engines[instance], url)
        if "api_keys_file" in router_settings:
            router_settings["operator_keys_file"] = str(write_secret(self._directory / "operators", OPERATOR_KEY))
        for cluster in (name for name, kind in self._clusters.items() if kind == "pd"):
            settings = {"managers": [self.manager_grpc], "cluster": cluster, "probe_interval": "200ms"}
            # On a busy machine managers still decide, and engines do not count as silent.
            settings |= {"manager_timeout": "10s", "silence_seconds": "20s", **router_settings}
            router, self.router_urls[cluster] = self._stack.start_router(settings, name=f"router-{cluster}")
            self._stack.await_server(router, self.router_urls[cluster])
            self.children.wait_until(router, functools.partial(self._sees_all, cluster), seconds=90.0)

    def _sees_all(self, cluster: str) -> bool:
        return self.health(cluster) == dict.fromkeys(self.engine_urls, True)

    def health(self, cluster: str = "west") -> dict[str, bool]:
        """Return which instances the router of a PD cluster considers healthy."""
        try:
            page = urllib.request.Request(f"{self.router_urls[cluster]}/health", headers=OPERATOR)
            found: dict[str, bool] = get_json(page)["instances"]
        except OSError:
            return {}
        return found

    def kill_engine(self, instance: str) -> None:
        self.engines[instance] = self.children.kill_and_restart(self.engines[instance])

    def kill_manager(self) -> None:
        self.manager = self.children.kill_and_restart(self.manager)

    def kill_redis(self) -> None:
        kill_embedded_redis(self.manager.process.pid)

    def kill_agent(self, name: str) -> None:
        agent = self.agents[name]
        child = self.children.kill_and_restart(agent.child)
        self.agents[name] = AgentProcess(child, name, agent.socket, agent.wire, agent.status_url)

    def transfers(self, instance: str) -> dict[str, int]:
        """Return an engine's transfers: sent, right, wrong, nothing."""
        found: dict[str, int] = get_json(f"{self.engine_urls[instance]}/transfers")
        return found


@contextlib.contextmanager
def running_deployment(
    directory: Path,
    *,
    num_engines: int = 2,
    shape: LinkShape = UNSHAPED,
    engine_flags: Sequence[str] = (),
    clusters: Mapping[str, ClusterKind] = CLUSTERS,
    router_settings: Mapping[str, Any] = MappingProxyType({}),
    **manager_settings: Any,
) -> Iterator[ProcessDeployment]:
    """Yield a deployment with one node per cluster. The relay of west has this shape."""
    with Children(directory) as children, contextlib.ExitStack() as relays:
        site = ProcessDeployment(children, Stack(children, directory), directory, clusters)
        site.start_manager(**manager_settings)
        for name in clusters:
            wire = free_address()
            relay = relays.enter_context(Relay(wire, shape if name == "west" else UNSHAPED))
            site.start_cluster(name, relay, wire=wire, num_engines=num_engines, flags=engine_flags)
        site.start_routers(**router_settings)
        yield site


@contextlib.contextmanager
def running_pd_cluster(
    directory: Path, roles: Sequence[InstanceRole], *, engine_flags: Sequence[str] = (), **manager_settings: Any
) -> Iterator[ProcessDeployment]:
    """Yield the PD cluster "west" alone, each engine on its own node w0/0, w1/0, … in these roles."""
    with Children(directory) as children, contextlib.ExitStack() as relays:
        site = ProcessDeployment(children, Stack(children, directory), directory)
        site.start_manager(**manager_settings)
        for number, role in enumerate(roles):
            wire = free_address()
            relay = relays.enter_context(Relay(wire, UNSHAPED))
            site.start_node(f"w{number}", relay, cluster="west", role=role, wire=wire, flags=engine_flags)
        site.start_routers()
        yield site


def fresh_prompt(num_tokens: int) -> list[int]:
    """Return a prompt that shares no block with another one."""
    seed = next(_seeds)
    return [(seed * 7919 + position * 31) % 50_000 for position in range(num_tokens)]


async def ask(
    session: aiohttp.ClientSession, url: str, prompt: list[int], *, num_tokens: int = 8, key: str = ""
) -> Outcome:
    """Stream one completion to its end, successful or not. Raise TimeoutError if there is none."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "stream": True}
    token_ids: list[int] = []
    headers: dict[str, str] = {}
    error, asked_at, ttft_seconds = "ended without [DONE]", time.monotonic(), math.inf
    try:
        async with (
            asyncio.timeout(REQUEST_SECONDS),
            session.post(
                f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"} if key else {}
            ) as response,
        ):
            headers = {name.lower(): value for name, value in response.headers.items()}
            async for line in response.content:
                if line.strip() == b"data: [DONE]":
                    error = ""
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:  # The engine failed after the status.
                        error = event["error"]["message"]
                        break
                    ttft_seconds = min(ttft_seconds, time.monotonic() - asked_at)
                    token_ids += event["choices"][0]["token_ids"]
            error = f"status {response.status}" if response.status != 200 else error
    except aiohttp.ClientError as failure:
        error = repr(failure)
    return Outcome(prompt, token_ids, answer_tokens(prompt, num_tokens), error, headers, ttft_seconds)


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session
