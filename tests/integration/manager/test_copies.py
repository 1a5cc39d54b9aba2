"""A manager has real agents copy prefixes over TCP: what the receiver lacks travels, and nothing is left half done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prfaas.errors import IndexRefusal
from prfaas.manager.daemon import Manager
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.translate import prefix_message
from prfaas.types import Prefix
from tests.integration.agent.prefixes import BLOCK_TOKENS, Hand, chain_of, prefix_of, sizes, three_groups
from tests.integration.agent.test_two_agents import Agents, RunningAgent
from tests.integration.manager.deployment import SECRET, Deployment, match_request
from tests.waiting import until
from tools.link import Relay

CHAIN = chain_of(400)
PREFIX = prefix_of(CHAIN, 327)  # ten full blocks, a partial one and the state of exactly that length
WHOLE_BYTES = sizes(11, 3, 1)


class Site:
    """A manager and agents that report to it."""

    def __init__(self, deployment: Deployment, manager: Manager, agents: Agents) -> None:
        self.manager = manager
        self.client: ManagerClient = deployment.client(manager)
        self._deployment = deployment
        self._agents = agents
        self.hands: list[Hand] = []

    async def agent(self, name: str, cluster: str = "pd", **settings: str) -> RunningAgent:
        values = {"managers": self.manager.address, "cluster": cluster} | settings
        agent = await asyncio.to_thread(self._agents.start, name, **values)
        await until(lambda: any(its.node.name == name for its in self.manager.world.live()), what=name)
        return agent

    async def node(self, name: str, cluster: str = "pd", *, dtype: str = "float32", **settings: str) -> Hand:
        """An agent with one engine beside it."""
        agent = await self.agent(name, cluster, **settings)
        hand = await asyncio.to_thread(Hand, agent, f"{name}-engine", three_groups(dtype=dtype))
        self.hands.append(hand)
        await until(lambda: self._has_layout(name), what=f"{name}'s layout")
        return hand

    def _has_layout(self, name: str) -> bool:
        return any(its.node.name == name and its.node.layouts for its in self.manager.world.live())

    async def copy(
        self, prefix: Prefix, source: str, destination: str, *, name: str = "router", seconds: float = 20.0
    ) -> pb.CopyResponse:
        request = pb.CopyRequest(prefix=prefix_message(prefix), source=source, destination=destination, priority=1)
        request.timeout_seconds = seconds
        client = self.client if name == "router" else self._deployment.client(self.manager, name=name)
        return await client.copy(request, timeout_seconds=30.0)

    async def usable(self) -> dict[str, int]:
        response = await self.client.match(match_request(CHAIN, stated=(327,)))
        return {match.node: match.usable_tokens for match in response.nodes}


@pytest.fixture
async def site(deployment: Deployment, tmp_path: Path) -> AsyncIterator[Site]:
    manager = await deployment.start_manager()
    agents = Agents(tmp_path, SECRET)
    made = Site(deployment, manager, agents)
    yield made
    for hand in made.hands:
        hand.close()
    await asyncio.to_thread(agents.stop)


async def test_a_prefix_of_all_groups_arrives_whole_and_is_in_the_index(site: Site) -> None:
    east, west = await site.node("east"), await site.node("west", "prfaas")
    await asyncio.to_thread(east.leave, PREFIX)
    end = await site.copy(PREFIX, "east", "west")
    assert (end.outcome, end.moved_bytes, end.held_bytes) == ("completed", WHOLE_BYTES, 0)
    assert await asyncio.to_thread(west.holds, PREFIX)
    await _until_usable(site, {"east": 327, "west": 327})


async def _until_usable(site: Site, expected: dict[str, int]) -> None:
    async with asyncio.timeout(10):
        while await site.usable() != expected:  # noqa: ASYNC110 - announced behind the answer
            await asyncio.sleep(0.02)


async def test_only_what_the_receiver_lacks_travels(site: Site) -> None:
    east, west = await site.node("east"), await site.node("west")
    await asyncio.to_thread(east.leave, PREFIX)
    await asyncio.to_thread(west.leave, prefix_of(CHAIN, 8 * BLOCK_TOKENS))
    end = await site.copy(PREFIX, "east", "west")
    # of the window's blocks 8, 9 and 10 none was in the shorter prefix's window; of the attention blocks the first 8 were
    assert (end.outcome, end.held_bytes) == ("completed", sizes(8, 0, 0))
    assert end.moved_bytes == WHOLE_BYTES - sizes(8, 0, 0)
    assert await asyncio.to_thread(west.holds, PREFIX)


async def test_the_same_copy_again_moves_nothing(site: Site) -> None:
    east, west = await site.node("east"), await site.node("west")
    await asyncio.to_thread(east.leave, PREFIX)
    both = await asyncio.gather(site.copy(PREFIX, "east", "west"), site.copy(PREFIX, "east", "west"))
    assert {end.outcome for end in both} == {"completed"}
    again = await site.copy(PREFIX, "east", "west")
    assert (again.outcome, again.moved_bytes, again.held_bytes) == ("completed", 0, WHOLE_BYTES)
    assert await asyncio.to_thread(west.holds, PREFIX)


async def test_nothing_stays_taken_after_a_copy(site: Site) -> None:
    east = await site.node("east")
    agent = await site.agent("west")
    west = await asyncio.to_thread(Hand, agent, "west-engine")
    site.hands.append(west)
    await asyncio.to_thread(east.leave, PREFIX)
    assert (await site.copy(PREFIX, "east", "west")).outcome == "completed"
    await until(lambda: agent.pool()["transfer"] == agent.pool()["quarantined"] == 0, what="west's slots")
    assert agent.pool()["prefix"] == 11 + 3 + 1


async def test_a_prefix_that_is_gone_is_said_to_be(site: Site) -> None:
    east, _ = await site.node("east"), await site.node("west")
    await asyncio.to_thread(east.leave, prefix_of(CHAIN, 8 * BLOCK_TOKENS))
    end = await site.copy(PREFIX, "east", "west")
    assert (end.outcome, end.moved_bytes) == ("evicted", 0)


async def test_a_receiver_without_room_says_so_and_keeps_what_it_has(site: Site) -> None:
    east, west = await site.node("east"), await site.node("west", **{"pool-bytes": "512KiB"})
    await asyncio.to_thread(east.leave, PREFIX)
    kept = prefix_of(chain_of(400, seed=1), 64)
    await asyncio.to_thread(west.leave, kept)
    end = await site.copy(PREFIX, "east", "west")
    assert (end.outcome, end.moved_bytes) == ("no_memory", 0)
    assert await asyncio.to_thread(west.holds, kept)


async def test_a_receiver_with_another_layout_refuses(site: Site) -> None:
    east, _ = await site.node("east"), await site.node("west", dtype="float16")
    await asyncio.to_thread(east.leave, PREFIX)
    assert (await site.copy(PREFIX, "east", "west")).outcome == "layout_mismatch"


async def test_a_node_without_an_engine_of_the_model_neither_sends_nor_receives(site: Site) -> None:
    east = await site.node("east")
    await site.agent("west")
    await asyncio.to_thread(east.leave, PREFIX)
    assert (await site.copy(PREFIX, "east", "west")).outcome == "no_layout"
    assert (await site.copy(PREFIX, "west", "east")).outcome == "no_layout"


async def test_a_sender_that_dies_ends_the_copy(site: Site, tmp_path: Path) -> None:
    agent = await site.agent("east")
    east = await asyncio.to_thread(Hand, agent, "east-engine")
    site.hands.append(east)
    await asyncio.to_thread(east.leave, PREFIX)
    with Relay("127.0.0.1:9") as relay:  # nobody listens there, so that the copy cannot end by itself
        await site.node("west", advertise=relay.address)
        copying = asyncio.create_task(site.copy(PREFIX, "east", "west"))
        await until(lambda: len(site.manager.copies) == 1, what="the order")
        agent.process.kill()
        assert (await copying).outcome == "unreachable"
    assert len(site.manager.copies) == 0


async def test_nodes_command_nobody_and_nobody_commands_an_unknown_node(site: Site) -> None:
    await site.node("east")
    await site.node("west")
    with pytest.raises(IndexRefusal) as refusal:
        await site.copy(PREFIX, "east", "west", name="west")
    assert refusal.value.reason == "unauthenticated"
    with pytest.raises(IndexRefusal) as unknown:
        await site.copy(PREFIX, "east", "north")
    assert unknown.value.reason == "unknown_node"
    bad = Prefix(PREFIX.model, PREFIX.units[:-1], PREFIX.num_tokens, PREFIX.end_hash)
    with pytest.raises(IndexRefusal) as alien:
        await site.copy(bad, "east", "west")
    assert alien.value.reason == "alien_hash"
