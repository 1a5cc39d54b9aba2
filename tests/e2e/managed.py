"""A deployment with everything in it: manager with its Redis, two agents, two engines, a router; each may be killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas.kv.layout import Layout
from tests.e2e.pair import FLAGS, PATIENT
from tests.support.embedded_redis import kill_embedded_redis
from tools.demo.client import Answer, complete, get_json, prompt_tokens
from tools.free_ports import free_address
from tools.link import Relay
from tools.processes import Child, Children
from tools.stack import AgentProcess, Stack, attached_layout, engine_flags
from tools.tiny_models import VOCABULARY, make_model

FAMILY = "granite4h"
THRESHOLD_TOKENS = 256


@dataclass
class Deployment:
    """`reports`: what the agents tell the manager goes through here."""

    children: Children
    manager: Child
    manager_url: str
    agents: dict[str, AgentProcess]
    engine_urls: dict[str, str]
    router_url: str
    reports: Relay
    family: str
    layout: Layout

    def ask(self, url: str, prompt: list[int], **more: Any) -> Answer:
        body = {"model": self.family, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        return complete(url, body | more)

    def reference(self, prompt: list[int]) -> tuple[int, ...]:
        """What one engine answers that takes up nothing."""
        return self.ask(self.engine_urls["west"], prompt, cache_salt=os.urandom(8).hex()).token_ids

    def kill_manager(self) -> None:
        self.manager = self.children.kill_and_restart(self.manager)

    def kill_redis(self) -> None:
        kill_embedded_redis(self.manager.process.pid)

    def kill_agent(self, name: str) -> None:
        agent = self.agents[name]
        child = self.children.kill_and_restart(agent.child)
        self.agents[name] = AgentProcess(child, name, agent.socket, agent.wire, agent.status_url)

    def has_healed(self) -> bool:
        """Both nodes are alive for the manager, no engine is leaving blocks at one, and the manager knows of exactly those
        that each of them holds."""
        try:
            known = get_json(f"{self.manager_url}/digests")
            status = {agent.name: get_json(f"{agent.status_url}/status") for agent in self.agents.values()}
        except OSError:
            return False
        held = {
            name: its["reporting"] and its["reporting"]["digest"] for name, its in status.items()
        }  # null: not registered
        return bool(known == held) and not any(its["prefix_store"] for its in status.values())

    def loads(self) -> set[str]:
        """The engines whose load the manager knows."""
        nodes = get_json(f"{self.manager_url}/state").get("nodes", ())
        return {load["instance"] for node in nodes for load in node.get("engines", ())}


def prompt_of(num_tokens: int, *, seed: int) -> list[int]:
    return prompt_tokens(num_tokens, seed=seed, vocabulary=VOCABULARY)


@contextlib.contextmanager
def running_deployment(
    directory: Path,
    *,
    family: str = FAMILY,
    expiry_seconds: str = "5s",
    manager_settings: dict[str, Any] | None = None,
    one_cluster: bool = False,
    **agent_settings: Any,
) -> Iterator[Deployment]:
    """Start everything; it ends with the context. East is a PrfaaS cluster, or a PD-P instance of west's cluster."""
    model = make_model(family, directory / family)
    with Children(directory) as children:
        stack = Stack(children, directory)
        manager, grpc, manager_url = stack.start_manager(
            threshold_tokens=THRESHOLD_TOKENS,
            redis_directory=str(directory / "redis"),
            heartbeat_seconds="1s",
            expiry_seconds=expiry_seconds,
            **(manager_settings or {}),
        )
        stack.await_server(manager, manager_url, path="/healthz")
        with Relay(grpc) as reports:
            west = {"cluster": "west", "cluster_kind": "pd"}
            east = west if one_cluster else {"cluster": "east", "cluster_kind": "prfaas"}
            addresses = {"east": free_address(), "west": free_address()}
            agents = {
                "east": _agent(
                    stack, "east", _beside("east", "prefill", family, addresses), reports, east | agent_settings
                ),
                "west": _agent(
                    stack, "west", _beside("west", "both", family, addresses), reports, west | agent_settings
                ),
            }
            for agent in agents.values():
                stack.await_agent(agent)
            flags = engine_flags(chunk_tokens=256) + FLAGS.get(family, ())
            roles = {"east": "kv_producer", "west": "kv_both"}
            engines = {
                name: stack.start_engine(
                    name,
                    model,
                    agent=agents[name],
                    role=roles[name],
                    extra=flags,
                    address=addresses[name],
                    connector=PATIENT,
                )
                for name in agents
            }
            for engine in engines.values():
                stack.await_server(engine.child, engine.url)
            router, url = stack.start_router({"managers": [grpc], "cluster": "west", "manager_timeout": "10s"})
            stack.await_server(router, url)
            urls = {name: engine.url for name, engine in engines.items()}
            layout = attached_layout(engines["west"].child.log)
            yield Deployment(children, manager, manager_url, agents, urls, url, reports, family, layout)


def _beside(name: str, role: str, family: str, addresses: dict[str, str]) -> list[dict[str, str]]:
    """The engine beside an agent, as its configuration names it."""
    return [{"instance": f"{name}/0", "url": f"http://{addresses[name]}", "role": role, "model": family}]


def _agent(
    stack: Stack, name: str, engines: list[dict[str, str]], reports: Relay, settings: dict[str, Any]
) -> AgentProcess:
    return stack.start_agent(name, managers=[reports.address], engines=engines, reconnect_seconds="3s", **settings)
