"""Deployment of real vLLM engines with a tiny model: nodes with an agent and an engine each, a manager, and a router."""

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prfaas.kv.layout import Layout
from prfaas.types import ClusterKind, InstanceRole
from tests.support.embedded_redis import kill_embedded_redis
from tests.support.waiting import wait_until
from tools.demo.client import Answer, complete, get_json, is_answering, prompt_tokens
from tools.free_ports import free_address
from tools.link import Relay
from tools.processes import Child, Children
from tools.stack import START_SECONDS, AgentProcess, EngineProcess, Stack, attached_layout
from tools.tiny_models import VOCABULARY, make_model

CHUNK_TOKENS = 256
# Patient connectors do not give up when a busy machine makes the agent slow.
PATIENT: dict[str, Any] = {"silence_seconds": "30s"}


@dataclass(frozen=True)
class EngineOptions:
    """Options of one vLLM engine, or a colocated instance; `connector` are keys of `kv_connector_extra_config`."""

    flags: tuple[str, ...]
    kv_role: str = "kv_both"
    connector: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    is_colocated: bool = False


@dataclass(frozen=True)
class Node:
    """Role of a node in the deployment."""

    cluster: str = "west"
    kind: ClusterKind = "pd"
    role: InstanceRole = "both"


class Deployment:
    """Running processes of a deployment. `reports` carries what agents report to the manager."""

    def __init__(self, children: Children, directory: Path, family: str, reports: Relay) -> None:
        self.children = children
        self.family = family
        self.stack = Stack(children, directory)
        self.agents: dict[str, AgentProcess] = {}
        self.engines: dict[str, EngineProcess] = {}
        self.manager: Child | None = None
        self.manager_address, self._manager_http = reports.target, free_address()
        self.reports = reports
        self._directory = directory
        self._router: tuple[Child, str] | None = None
        self._engine_addresses: dict[str, str] = {}
        self._numbers = itertools.count()

    def configure(
        self, nodes: Mapping[str, Node], *, manager: Mapping[str, Any] | None = None, **agent_settings: Any
    ) -> None:
        """Start manager and agents again with other settings and empty pools. Engines keep running."""
        former = [*([self._router[0]] if self._router else []), *(agent.child for agent in self.agents.values())]
        for child in [*former, *([self.manager] if self.manager else [])]:
            self.children.stop_child(child)
        self._router = None
        settings: dict[str, Any] = {
            "listen": self.manager_address,
            "http_listen": self._manager_http,
            "redis_directory": str(self._directory / f"redis-{next(self._numbers)}"),
            "expiry_seconds": "60s",
            "rebalance_bytes_per_second": "0Gbps",
            **(manager or {}),
        }
        self.manager, _, _ = self.stack.start_manager(**settings)
        self.stack.await_server(self.manager, self.manager_url, path="/healthz")
        self.agents = {name: self._start_agent(name, node, agent_settings) for name, node in nodes.items()}
        for agent in self.agents.values():
            self.stack.await_agent(agent)
        wait_until(lambda: self.agents.keys() <= get_json(f"{self.manager_url}/digests").keys(), what="known nodes")
        for name, engine in self.engines.items():
            wait_until(lambda name=name, url=engine.url: self._is_attached(name, url), what=f"engine {name} attached")  # type: ignore[misc]

    def _is_attached(self, name: str, url: str) -> bool:
        """Return whether an engine has attached to its new agent. An idle engine does so at its next request."""
        self.ask(url, [1, 2, 3], max_tokens=1)
        roles = {attached.split("/")[-2] for attached in self.agent_status(name)["engines"]}
        return roles == {"scheduler", "worker"}

    def _start_agent(self, name: str, node: Node, settings: Mapping[str, Any]) -> AgentProcess:
        address = self._engine_addresses.setdefault(name, free_address())
        beside = {"instance": f"{name}/0", "url": f"http://{address}", "role": node.role, "model": self.family}
        former = self.agents.get(name)
        fixed = {"listen": former.wire} if former else {}
        return self.stack.start_agent(
            name,
            managers=[self.reports.address],
            engines=[beside],
            cluster=node.cluster,
            cluster_kind=node.kind,
            **{"silence_seconds": "60s", **fixed, **settings},
        )

    def start_engines(self, options: Mapping[str, EngineOptions]) -> None:
        """Start all engines at the same time."""
        model = make_model(self.family, self._directory / self.family)
        for name, chosen in options.items():
            if chosen.is_colocated:
                self.engines[name] = self.stack.start_colocate(
                    model,
                    extra=chosen.flags,
                    address=self._engine_addresses[name],
                    agent_socket=str(self.agents[name].socket),
                )
                continue
            self.engines[name] = self.stack.start_engine(
                name,
                model,
                agent=self.agents[name],
                role=chosen.kv_role,
                extra=chosen.flags,
                address=self._engine_addresses[name],
                connector=PATIENT | dict(chosen.connector),
                environment=chosen.environment,
            )
        for engine in self.engines.values():
            self.stack.await_server(engine.child, engine.url)

    @property
    def manager_url(self) -> str:
        return f"http://{self._manager_http}"

    @property
    def router_url(self) -> str:
        """URL of a router of cluster west, which starts on first use."""
        if self._router is None:
            config = {"managers": [self.manager_address], "cluster": "west", "manager_timeout": "10s"}
            config |= {"silence_seconds": "60s"}  # Engines of one process answer late during a long step.
            self._router = self.stack.start_router(config)
            self.stack.await_server(*self._router)
            wait_until(lambda: self._known_engines() == self.agents.keys(), what="a router that knows all engines")
        return self._router[1]

    def _known_engines(self) -> set[str]:
        assert self._router is not None
        instances = get_json(f"{self._router[1]}/health")["instances"]
        return {name.partition("/")[0] for name, is_healthy in instances.items() if is_healthy}

    def layout(self) -> Layout:
        """Return the layout of the first engine, from its log."""
        return attached_layout(next(iter(self.engines.values())).child.log)

    def ask(self, url: str, prompt: list[int], *, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        body = {"model": self.family, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        return complete(url, body | fields, headers=headers)

    def reference(self, prompt: list[int], **fields: Any) -> tuple[int, ...]:
        """Return the answer of one engine that reuses nothing."""
        url = list(self.engines.values())[-1].url
        return self.ask(url, prompt, cache_salt=os.urandom(8).hex(), **fields).token_ids

    def kill_manager(self) -> None:
        assert self.manager is not None
        self.manager = self.children.kill_and_restart(self.manager)

    def kill_redis(self) -> None:
        assert self.manager is not None
        kill_embedded_redis(self.manager.process.pid)

    def kill_agent(self, name: str) -> None:
        agent = self.agents[name]
        child = self.children.kill_and_restart(agent.child)
        self.agents[name] = AgentProcess(child, name, agent.socket, agent.wire, agent.status_url)

    def kill_engine(self, name: str) -> None:
        """Kill an engine and start it again at the same address."""
        engine = self.engines[name]
        self.engines[name] = EngineProcess(self.children.kill_and_restart(engine.child), engine.url)

    def await_engine(self, name: str) -> None:
        engine = self.engines[name]
        self.children.wait_until(engine.child, lambda: is_answering(f"{engine.url}/health"), seconds=START_SECONDS)

    def has_healed(self) -> bool:
        """Return whether the manager knows exactly the blocks that each node holds, and no engine is storing any."""
        try:
            known = get_json(f"{self.manager_url}/digests")
            statuses = {name: self.agent_status(name) for name in self.agents}
        except OSError:
            return False
        held = {name: status["reporting"] and status["reporting"]["digest"] for name, status in statuses.items()}
        return bool(known == held) and not any(status["prefix_store"] for status in statuses.values())

    def agent_status(self, name: str) -> dict[str, Any]:
        status: dict[str, Any] = get_json(f"{self.agents[name].status_url}/status")
        return status

    def num_reports(self, name: str) -> int:
        """Return the number of the latest change that an agent has reported."""
        return int(self.agent_status(name)["reporting"]["sequence"])

    def loads(self) -> set[str]:
        """Return the engines whose load the manager knows."""
        nodes = get_json(f"{self.manager_url}/state").get("nodes", ())
        return {load["instance"] for node in nodes for load in node.get("engines", ())}

    def inbound_transfers(self, name: str) -> list[dict[str, Any]]:
        """Return the transfers that have come to a node, oldest first."""
        records = get_json(f"{self.agents[name].status_url}/transfers")
        return [record for record in records if record["direction"] == "in"]


@contextlib.contextmanager
def empty_deployment(directory: Path, family: str) -> Iterator[Deployment]:
    """Yield a deployment without processes, which stops them in the end."""
    with Children(directory) as children, Relay(free_address()) as reports:
        yield Deployment(children, directory, family, reports)


def random_prompt(length: int, *, seed: int) -> list[int]:
    return prompt_tokens(length, seed=seed, vocabulary=VOCABULARY)
