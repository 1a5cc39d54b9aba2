"""Manager in this process with agent processes that report to it, each with a client of its pool."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prfaas.hashing import HashChain
from prfaas.manager.daemon import Manager
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.translate import prefix_message
from prfaas.types import Prefix
from tests.support.agents import Agents, RunningAgent
from tests.support.deployment import SECRET, Deployment, match_request
from tests.support.prefix_engine import PrefixEngine, three_groups
from tests.support.waiting import PATIENCE_SECONDS, until


class AgentDeployment:
    """Manager and agents that report to it."""

    def __init__(self, deployment: Deployment, manager: Manager, agents: Agents) -> None:
        self.manager = manager
        self.client: ManagerClient = deployment.client(manager)
        self._deployment = deployment
        self._agents = agents
        self.hands: dict[str, PrefixEngine] = {}
        self.agents: dict[str, RunningAgent] = {}

    async def close(self) -> None:
        for hand in self.hands.values():
            hand.close()
        await asyncio.to_thread(self._agents.stop)

    async def agent(self, name: str, cluster: str = "pd", **settings: str) -> RunningAgent:
        values = {"managers": self.manager.address, "cluster": cluster} | settings
        agent = await asyncio.to_thread(self._agents.start, name, **values)
        await until(lambda: any(member.node.name == name for member in self.manager.world.live()), what=name)
        return agent

    async def node(self, name: str, cluster: str = "pd", *, dtype: str = "float32", **settings: str) -> PrefixEngine:
        """Start an agent with one engine."""
        self.agents[name] = agent = await self.agent(name, cluster, **settings)
        hand = await asyncio.to_thread(PrefixEngine, agent, f"{name}-engine", three_groups(dtype=dtype))
        self.hands[name] = hand
        await until(lambda: self._has_layout(name), what=f"{name}'s layout")
        return hand

    def _has_layout(self, name: str) -> bool:
        return any(member.node.name == name and member.node.layouts for member in self.manager.world.live())

    def client_named(self, name: str) -> ManagerClient:
        return self._deployment.client(self.manager, name=name)

    async def copy(
        self, prefix: Prefix, source: str, destination: str, *, name: str = "router", seconds: float = PATIENCE_SECONDS
    ) -> pb.CopyResponse:
        request = pb.CopyRequest(prefix=prefix_message(prefix), source=source, destination=destination, priority=1)
        request.timeout_seconds = seconds
        client = self.client if name == "router" else self.client_named(name)
        return await client.copy(request, timeout_seconds=2 * PATIENCE_SECONDS)

    async def usable(self, chain: HashChain, *stated: int) -> dict[str, int]:
        response = await self.client.match(match_request(chain, stated=stated))
        return {match.node: match.usable_tokens for match in response.nodes}


@asynccontextmanager
async def running_agents(deployment: Deployment, directory: Path, **settings: Any) -> AsyncIterator[AgentDeployment]:
    """Yield a deployment whose manager has these settings. Its agents end with the context."""
    made = AgentDeployment(deployment, await deployment.start_manager(**settings), Agents(directory, SECRET))
    try:
        yield made
    finally:
        await made.close()
