"""Deployment with two nodes per cluster and two routers, under load while its processes are replaced."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prfaas.types import InstanceRole
from tests.integration.console.terminal import run
from tests.support.process_deployment import CLUSTERS, UNSHAPED, Outcome, ProcessDeployment, ask, client, fresh_prompt
from tests.support.waiting import until
from tools.demo.client import get_json
from tools.free_ports import free_address
from tools.link import Relay
from tools.processes import Child
from tools.stack import AgentProcess, Stack

T = 256
NUM_CLIENTS = 4
ANSWERS_BETWEEN = 8  # Answers to wait for after each restart, so that everything works before the next one.
NODES = {"w0": "west", "w1": "west", "e0": "east", "e1": "east"}


@dataclass
class RouterProcess:
    """A router. Clients use an open one, as a load balancer would choose."""

    child: Child
    url: str
    is_open: bool = True
    num_requests: int = 0  # Requests under way.


class RedundantDeployment(ProcessDeployment):
    """Two nodes per cluster and two routers, so that one of each remains during a restart."""

    doors: list[RouterProcess]
    secret_file: Path

    def start(self, stack: Stack, relays: ExitStack) -> None:
        # No node may expire on a slow machine: a restarted agent registers again.
        self.start_manager(threshold_tokens=T, expiry_seconds="60s")
        for name, cluster in NODES.items():
            wire = free_address()
            role: InstanceRole = "prefill" if CLUSTERS[cluster] == "prfaas" else "both"
            relay = relays.enter_context(Relay(wire, UNSHAPED))
            self.start_node(name, relay, cluster=cluster, role=role, wire=wire)
        settings = {"managers": [self.manager_grpc], "cluster": "west", "probe_interval": "200ms"}
        self.doors = [RouterProcess(*stack.start_router(settings, name=f"router-{number}")) for number in range(2)]
        self.secret_file = stack.secret_file

    def _health_of(self, door: RouterProcess) -> dict[str, bool]:
        try:
            found: dict[str, bool] = get_json(f"{door.url}/health")["instances"]
        except OSError:
            return {}
        return found

    def _state(self) -> dict[str, Any]:
        found: dict[str, Any] = get_json(f"{self.manager_url}/state")
        return found

    async def is_whole(self) -> None:
        """Wait until the manager has all nodes, none drains, and every router finds all engines healthy."""
        await until(lambda: len(self._state().get("nodes", [])) == len(NODES), seconds=90, what="every node")
        await until(lambda: not self._state().get("resting_instances"), seconds=90, what="nothing that rests")
        for door in self.doors:
            await until(partial(self._is_well, door), seconds=90, what=f"healthy engines at {door.url}")

    def _is_well(self, door: RouterProcess) -> bool:
        return self._health_of(door) == dict.fromkeys(self.engine_urls, True)

    async def restart_manager(self) -> None:
        self.manager = await asyncio.to_thread(self.children.restart, self.manager)
        await until(lambda: _answers(f"{self.manager_url}/state"), seconds=90, what="the manager")

    async def restart_router(self, number: int = 0) -> None:
        door = self.doors[number]
        door.is_open = False
        await until(lambda: not door.num_requests, seconds=90, what="answers")
        door.child = await asyncio.to_thread(self.children.restart, door.child)
        await until(lambda: self._is_well(door), seconds=90, what="the router")
        door.is_open = True

    async def restart_node(self, name: str) -> None:
        """Drain a node with the console's command, then restart its agent and its engine."""
        flags = [f"--managers={self.manager_grpc}", f"--secret-file={self.secret_file}", "--within=60s"]
        drained = await asyncio.to_thread(run, "drain", name, *flags)
        assert drained.document["num_requests_left"] == 0, drained
        await asyncio.to_thread(self._restart_agent_and_engine, name)

    def _restart_agent_and_engine(self, name: str) -> None:
        agent, instance = self.agents[name], f"{name}/0"
        self.agents[name] = AgentProcess(
            self.children.restart(agent.child), name, agent.socket, agent.wire, agent.status_url
        )
        self.engines[instance] = self.children.restart(self.engines[instance])


def _answers(url: str) -> bool:
    try:
        get_json(url)
    except OSError:
        return False
    return True


async def _keep_asking(
    site: RedundantDeployment, outcomes: list[Outcome], is_over: asyncio.Event, lengths: Iterator[int]
) -> None:
    doors = itertools.cycle(site.doors)
    async with client() as session:
        while not is_over.is_set():
            door = next(door for door in doors if door.is_open)
            door.num_requests += 1
            outcomes.append(await ask(session, door.url, fresh_prompt(next(lengths))))
            door.num_requests -= 1


@contextlib.asynccontextmanager
async def load(site: RedundantDeployment) -> AsyncIterator[list[Outcome]]:
    """Yield the answers so far of clients that keep asking, with short and long prompts in turn."""
    outcomes: list[Outcome] = []
    is_over, lengths = asyncio.Event(), itertools.cycle((T // 2, 2 * T, 3 * T))
    clients = [asyncio.create_task(_keep_asking(site, outcomes, is_over, lengths)) for _ in range(NUM_CLIENTS)]
    try:
        yield outcomes
    finally:
        is_over.set()
        await asyncio.gather(*clients)


async def until_more(outcomes: list[Outcome]) -> None:
    """Wait until the restarted process works again."""
    wanted = len(outcomes) + ANSWERS_BETWEEN
    await until(lambda: len(outcomes) >= wanted, seconds=90, what="more answers")
