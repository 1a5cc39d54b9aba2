"""Four engines: one prefills in a PrfaaS cluster, one within the PD cluster, two decode; the manager's policy changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prfaas.types import ClusterKind, InstanceRole
from tests.e2e.managed import FAMILY
from tests.e2e.pair import PATIENT
from tools.demo.client import Answer, complete, get_json, get_text
from tools.free_ports import free_address
from tools.processes import Child, Children
from tools.stack import AgentProcess, Stack, engine_flags
from tools.tiny_models import make_model

# name: cluster, its kind, the role there, vLLM's kv_role
NODES: dict[str, tuple[str, ClusterKind, InstanceRole, str]] = {
    "east": ("east", "prfaas", "prefill", "kv_producer"),
    "west-p": ("west", "pd", "prefill", "kv_producer"),
    "west-d0": ("west", "pd", "decode", "kv_both"),
    "west-d1": ("west", "pd", "decode", "kv_both"),
}


@dataclass
class FourEngines:
    """`reference` answers what one engine computes that takes up nothing."""

    children: Children
    stack: Stack
    directory: Path
    manager: Child
    manager_addresses: tuple[str, str]  # gRPC, HTTP
    router_url: str
    agents: dict[str, AgentProcess] = field(default_factory=dict)
    engine_urls: dict[str, str] = field(default_factory=dict)

    def ask(self, prompt: list[int], *, session: str = "", num_tokens: int = 8) -> Answer:
        headers = {"x-session-id": session} if session else {}
        return complete(self.router_url, _body(prompt, num_tokens), headers=headers)

    def reference(self, prompt: list[int], *, num_tokens: int = 8) -> tuple[int, ...]:
        body = _body(prompt, num_tokens) | {"cache_salt": "reference"}
        return complete(self.engine_urls["west-d0"], body).token_ids

    def set_policy(self, **settings: Any) -> None:
        """Start the manager anew under other settings; the nodes find it again."""
        self.children.stop_child(self.manager)
        self.manager = _manager(self.stack, self.directory, self.manager_addresses, settings)
        self.children.wait_until(self.manager, self.is_whole, seconds=150.0)

    def is_whole(self) -> bool:
        """Whether the manager has heard of every engine's load since it started."""
        try:
            state = get_text(f"http://{self.manager_addresses[1]}/state")
        except OSError:
            return False
        return all(f'"instance": "{name}/0", "num' in state or f'"instance": "{name}/0"}}' in state for name in NODES)

    def sent_bytes(self) -> int:
        """KV that has left any agent, in bytes."""
        total = 0.0
        for agent in self.agents.values():
            for line in get_text(f"{agent.status_url}/metrics").splitlines():
                if line.startswith("prfaas_agent_acknowledged_bytes_total"):
                    total += float(line.rpartition(" ")[2])
        return int(total)

    def sent_by_transfer(self) -> dict[str, int]:
        """Bytes of KV that a receiver has acknowledged, by whole transfer, of the last 1,024 of each agent."""
        records = (its for agent in self.agents.values() for its in get_json(f"{agent.status_url}/transfers"))
        whole = (record for record in records if (record["direction"], record["outcome"]) == ("out", "completed"))
        return {its["transfer_id"]: its["acknowledged_bytes"] for its in whole}


def _body(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    return {"model": FAMILY, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}


def _manager(stack: Stack, directory: Path, addresses: tuple[str, str], settings: dict[str, Any]) -> Child:
    fixed = {"listen": addresses[0], "http_listen": addresses[1], "redis_directory": str(directory / "redis")}
    quick = {"heartbeat_seconds": "1s", "expiry_seconds": "60s", "rebalance_bytes_per_second": "0Gbps"}
    manager, _, url = stack.start_manager(**fixed, **quick, **settings)
    stack.await_server(manager, url, path="/healthz")
    return manager


@contextlib.contextmanager
def four_engines(directory: Path) -> Iterator[FourEngines]:
    """Start everything; it ends with the context."""
    model = make_model(FAMILY, directory / FAMILY)
    with Children(directory) as children:
        stack = Stack(children, directory)
        addresses = (free_address(), free_address())
        manager = _manager(stack, directory, addresses, {})
        running = FourEngines(children, stack, directory, manager, addresses, "")
        engines = []
        for name, (cluster, kind, role, kv_role) in NODES.items():
            address = free_address()
            beside = {"instance": f"{name}/0", "url": f"http://{address}", "role": role, "model": FAMILY}
            agent = stack.start_agent(
                name,
                managers=[addresses[0]],
                engines=[beside],
                cluster=cluster,
                cluster_kind=kind,
                reconnect_seconds="3s",
            )
            stack.await_agent(agent)
            running.agents[name] = agent
            flags = engine_flags(chunk_tokens=256)
            engines.append(
                stack.start_engine(
                    name, model, agent=agent, role=kv_role, extra=flags, address=address, connector=PATIENT
                )
            )
            running.engine_urls[name] = engines[-1].url
        for engine in engines:
            stack.await_server(engine.child, engine.url)
        router, running.router_url = stack.start_router(
            {"managers": [addresses[0]], "cluster": "west", "manager_timeout": "10s"}
        )
        stack.await_server(router, running.router_url)
        yield running
