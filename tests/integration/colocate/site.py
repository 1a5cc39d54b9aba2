"""A deployment whose engines are executors: manager, router, two agents, and beside each a `prfaas-colocate serve`."""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas.colocate.device import devices
from prfaas.colocate.model.cache import CacheShape
from tests.support.sequential_generation import generate
from tools.demo.client import get_json
from tools.free_ports import free_address
from tools.processes import Child, Children
from tools.stack import AgentProcess, Stack

MODEL = "prfaas-hybrid"
THRESHOLD_TOKENS = 300
MAX_TOKENS = 1024
FLAGS = ("--shape", "tiny", "--dtype", "float64", "--seed", "3", "--num-threads", "1", "--reuse-min-tokens", "32")
PATIENT = ("--open-wait-seconds", "60s")  # A slow agent is not under test.


@dataclass
class Site:
    """West decodes (role both); east is a PrfaaS cluster (role prefill). Both are executors with the same weights."""

    children: Children
    agents: dict[str, AgentProcess]
    engines: dict[str, Child]
    urls: dict[str, str]
    manager_url: str
    router_url: str

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = get_json(f"{self.urls[name]}/status")
        return found

    def index_is_true(self) -> bool:
        """Return whether the manager knows of exactly the blocks that each node holds."""
        known = get_json(f"{self.manager_url}/digests")
        held = {name: get_json(f"{item.status_url}/status")["reporting"] for name, item in self.agents.items()}
        return bool(known == {name: item["digest"] for name, item in held.items()})


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a whole answer as JSON."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        found: dict[str, Any] = json.load(response)
        return found


def sequential(prompt: list[int], num_tokens: int) -> list[int]:
    """Return the answer of the sequential engine with these weights."""
    cache = CacheShape(MAX_TOKENS // 16 + 2, 16, 2)
    shared = devices.allocate("tiny", cache, dtype="float64", seed=3)
    tensors = (shared[0].tensor, shared[1].tensor, shared[2].tensor)
    return generate(devices.model_on("tiny", cache, tensors, max_tokens=MAX_TOKENS), prompt, num_tokens)


@contextlib.contextmanager
def running_site(directory: Path) -> Iterator[Site]:
    """Start everything; it ends with the context."""
    with Children(directory) as children:
        stack = Stack(children, directory)
        manager, grpc, manager_url = stack.start_manager(
            threshold_tokens=THRESHOLD_TOKENS, redis_directory=str(directory / "redis")
        )
        urls = {name: f"http://{free_address()}" for name in ("east", "west")}
        clusters = {"east": "prfaas", "west": "pd"}
        roles = {"east": "prefill", "west": "both"}
        stack.await_server(manager, manager_url, path="/healthz")
        agents = {
            name: stack.start_agent(
                name,
                managers=[grpc],
                cluster=name,
                cluster_kind=clusters[name],
                engines=[{"instance": f"{name}/0", "url": url, "role": roles[name], "model": MODEL}],
            )
            for name, url in urls.items()
        }
        for agent in agents.values():
            stack.await_agent(agent)
        engines = {name: start_executor(children, name, urls[name], agents[name]) for name in urls}
        for name, engine in engines.items():
            stack.await_server(engine, urls[name])
        settings = {"managers": [grpc], "cluster": "west", "probe_interval": "200ms"}
        settings["manager_timeout"] = "60s"  # On a busy machine the manager still decides, not the router.
        router, router_url = stack.start_router(settings)
        stack.await_server(router, router_url)
        wanted = {f"{name}/0": True for name in urls}
        children.wait_until(router, lambda: get_json(f"{router_url}/health")["instances"] == wanted, seconds=150.0)
        yield Site(children, agents, engines, urls, manager_url, router_url)


def start_executor(children: Children, name: str, url: str, agent: AgentProcess) -> Child:
    script = str(Path(sys.executable).parent / "prfaas-colocate")
    command = [script, "serve", "--listen", url.removeprefix("http://"), "--agent-socket", str(agent.socket)]
    return children.start(f"colocate-{name}", [*command, "--max-tokens", str(MAX_TOKENS), *FLAGS, *PATIENT])
