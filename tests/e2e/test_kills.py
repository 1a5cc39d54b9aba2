"""Requests go on, right, while manager, Redis and agents are killed at random; afterwards everything has healed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until
from tools.demo.client import Answer, complete, get_json, prompt_tokens
from tools.processes import Child, Children, free_address
from tools.stack import AgentProcess, Stack, engine_flags
from tools.tiny_models import VOCABULARY, make_model

pytestmark = [pytest.mark.vllm]
FAMILY = "granite4h"
THRESHOLD_TOKENS = 256
PROMPT_TOKENS = 513
HEAL_SECONDS = 30.0


@dataclass
class Deployment:
    """Manager with its Redis, two agents, two engines, a router."""

    children: Children
    stack: Stack
    manager: Child
    manager_url: str
    agents: dict[str, AgentProcess]
    router_url: str
    west_url: str

    def ask(self, url: str, prompt: list[int], **more: Any) -> Answer:
        body = {"model": FAMILY, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        return complete(url, body | more)

    def kill_manager(self) -> None:
        self.manager = self.children.kill_and_restart(self.manager)

    def kill_redis(self) -> None:
        for entry in Path("/proc").glob("[0-9]*/stat"):
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[1]) == self.manager.process.pid and "redis" in (entry.parent / "comm").read_text():
                os.kill(int(entry.parent.name), signal.SIGKILL)
                return

    def kill_agent(self, name: str) -> None:
        agent = self.agents[name]
        child = self.children.kill_and_restart(agent.child)
        self.agents[name] = AgentProcess(child, name, agent.socket, agent.wire, agent.status_url)

    def has_healed(self) -> bool:
        """Both nodes are alive for the manager, and it knows of exactly the blocks that each of them holds."""
        try:
            known = get_json(f"{self.manager_url}/digests")
            held = {its.name: get_json(f"{its.status_url}/status")["reporting"] for its in self.agents.values()}
        except OSError:
            return False
        return bool(known == {name: its["digest"] for name, its in held.items()})

    def loads(self) -> set[str]:
        """The engines whose load the manager knows."""
        nodes = get_json(f"{self.manager_url}/state").get("nodes", ())
        return {load["instance"] for node in nodes for load in node.get("engines", ())}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("kills")
    model = make_model(FAMILY, directory / FAMILY)
    with Children(directory) as children:
        stack = Stack(children, directory)
        manager, grpc, manager_url = stack.start_manager(
            threshold_tokens=THRESHOLD_TOKENS,
            redis_directory=str(directory / "redis"),
            heartbeat_seconds="1s",
            expiry_seconds="5s",
        )
        stack.await_server(manager, manager_url, path="/healthz")
        urls = {"east": free_address(), "west": free_address()}
        agents = {
            "east": _agent(stack, "east", "prfaas", "prefill", grpc, urls["east"]),
            "west": _agent(stack, "west", "pd", "both", grpc, urls["west"]),
        }
        for agent in agents.values():
            stack.await_agent(agent)
        flags = engine_flags(chunk_tokens=256)
        roles = {"east": "kv_producer", "west": "kv_both"}
        engines = [
            stack.start_engine(name, model, agent=agents[name], role=roles[name], extra=flags, address=urls[name])
            for name in agents
        ]
        for engine in engines:
            stack.await_server(engine.child, engine.url)
        router, url = stack.start_router({"managers": [grpc], "cluster": "west"})
        stack.await_server(router, url)
        yield Deployment(children, stack, manager, manager_url, agents, url, engines[1].url)


def _agent(stack: Stack, name: str, kind: str, role: str, manager: str, engine: str) -> AgentProcess:
    engines = [{"instance": f"{name}/0", "url": f"http://{engine}", "role": role, "model": FAMILY}]
    return stack.start_agent(
        name, managers=[manager], cluster=name, cluster_kind=kind, engines=engines, reconnect_seconds="1s"
    )


def _run(deployment: Deployment, *, num_requests: int, num_kills: int, seed: int) -> None:
    source = random.Random(seed)
    kills: list[Callable[[], None]] = [
        deployment.kill_manager,
        deployment.kill_redis,
        lambda: deployment.kill_agent("east"),
        lambda: deployment.kill_agent("west"),
    ]
    prompts = [prompt_tokens(PROMPT_TOKENS, seed=seed + n, vocabulary=VOCABULARY) for n in range(num_requests)]
    wanted = [deployment.ask(deployment.west_url, its, cache_salt="reference").token_ids for its in prompts]
    moments = sorted(source.sample(range(num_requests), num_kills))
    for number, prompt in enumerate(prompts):
        if number in moments:
            kills[moments.index(number) % len(kills)]()
        assert deployment.ask(deployment.router_url, prompt).token_ids == wanted[number], f"request {number}"
    wait_until(deployment.has_healed, seconds=HEAL_SECONDS, what="a healed deployment")
    _assert_transfers_again(deployment, seed)


def _assert_transfers_again(deployment: Deployment, seed: int) -> None:
    """A long prompt goes through the whole path once more, within the time that healing may take."""
    deadline = time.monotonic() + HEAL_SECONDS
    for number in range(100):
        assert time.monotonic() < deadline, "no transfer has completed since the last kill"
        prompt = prompt_tokens(PROMPT_TOKENS, seed=seed + 10_000 + number, vocabulary=VOCABULARY)
        answer = deployment.ask(deployment.router_url, prompt)
        transfer = answer.headers.get("x-prfaas-transfer")
        records = {its["transfer_id"]: its for its in get_json(f"{deployment.agents['west'].status_url}/transfers")}
        if transfer in records and records[transfer]["outcome"] == "completed":
            return


@pytest.mark.timeout(300)
def test_answers_stay_right_while_each_process_is_killed_once(deployment: Deployment) -> None:
    _run(deployment, num_requests=12, num_kills=4, seed=1)


def test_the_manager_knows_how_busy_the_engines_are(deployment: Deployment) -> None:
    wait_until(lambda: deployment.loads() == {"east/0", "west/0"}, seconds=HEAL_SECONDS, what="the engines' loads")


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_answers_stay_right_over_a_hundred_requests_with_kills_at_random(deployment: Deployment) -> None:
    _run(deployment, num_requests=100, num_kills=20, seed=2)
