"""Prefix copies between real agents over TCP: only missing bytes travel, and nothing is left half done."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from prfaas.errors import IndexRefusal
from prfaas.hashing import HashChain
from prfaas.kv.layout import OPAQUE_PACKING
from prfaas.types import Prefix
from tests.support.agent_deployment import AgentDeployment, running_agents
from tests.support.deployment import Deployment
from tests.support.prefix_engine import BLOCK_TOKENS, MODEL, PrefixEngine, chain_of, prefix_of, sizes, three_groups
from tests.support.waiting import PATIENCE_SECONDS, until
from tools.link import Relay

CHAIN = chain_of(400)
PREFIX = prefix_of(CHAIN, 327)  # Ten full blocks, a partial one, and the state at exactly that length.
WHOLE_BYTES = sizes(11, 3, 1)
_seeds = itertools.count(1)
beside_others = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AgentDeployment]:
    """Nodes east and west, where each test has a prompt of its own, and another one when it is tried again."""
    directory = tmp_path_factory.mktemp("two")
    async with Deployment(directory) as deployment, running_agents(deployment, directory) as made:
        await made.node("east")
        await made.node("west", "prfaas")
        yield made


def _own_chain() -> HashChain:
    return chain_of(400, seed=next(_seeds))


@beside_others
async def test_copied_prefix_is_complete_and_indexed(two: AgentDeployment) -> None:
    chain = _own_chain()
    prefix = prefix_of(chain, 327)
    await asyncio.to_thread(two.hands["east"].leave, prefix)
    end = await two.copy(prefix, "east", "west")
    assert (end.outcome, end.moved_bytes, end.held_bytes) == ("completed", WHOLE_BYTES, 0)
    assert await asyncio.to_thread(two.hands["west"].holds, prefix)
    await _until_usable(two, {"east": 327, "west": 327}, chain)


async def _until_usable(site: AgentDeployment, expected: dict[str, int], chain: HashChain = CHAIN) -> None:
    """Return usable tokens of these nodes. A killed node stays in the answers for a while."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not expected.items() <= (await site.usable(chain, 327)).items():  # noqa: ASYNC110 - announced behind the answer
            await asyncio.sleep(0.02)


@beside_others
async def test_blocks_that_another_program_names_are_not_reported(two: AgentDeployment) -> None:
    opaque = replace(three_groups(), model="chunks", packing=OPAQUE_PACKING)
    store = await asyncio.to_thread(PrefixEngine, two.agents["west"], "store", opaque)
    chain = _own_chain()
    for engine in (store, two.hands["west"]):
        await asyncio.to_thread(engine.leave, prefix_of(chain, 327))
    store.close()
    await _until_usable(two, {"west": 327}, chain)
    layouts = [layout for member in two.manager.world.live() for layout in member.node.layouts]
    assert {layout.model for layout in layouts} == {MODEL}


@beside_others
async def test_only_missing_blocks_travel(two: AgentDeployment) -> None:
    chain = _own_chain()
    prefix = prefix_of(chain, 327)
    await asyncio.to_thread(two.hands["east"].leave, prefix)
    await asyncio.to_thread(two.hands["west"].leave, prefix_of(chain, 8 * BLOCK_TOKENS))
    end = await two.copy(prefix, "east", "west")
    # of the window's blocks 8, 9 and 10 none was in the shorter prefix's window; of the attention blocks the first 8 were
    assert (end.outcome, end.held_bytes) == ("completed", sizes(8, 0, 0))
    assert end.moved_bytes == WHOLE_BYTES - sizes(8, 0, 0)
    assert await asyncio.to_thread(two.hands["west"].holds, prefix)


@beside_others
async def test_repeated_copy_moves_nothing(two: AgentDeployment) -> None:
    prefix = prefix_of(_own_chain(), 327)
    await asyncio.to_thread(two.hands["east"].leave, prefix)
    both = await asyncio.gather(two.copy(prefix, "east", "west"), two.copy(prefix, "east", "west"))
    assert {end.outcome for end in both} == {"completed"}
    again = await two.copy(prefix, "east", "west")
    assert (again.outcome, again.moved_bytes, again.held_bytes) == ("completed", 0, WHOLE_BYTES)
    assert await asyncio.to_thread(two.hands["west"].holds, prefix)


@beside_others
async def test_copy_releases_all_leases(two: AgentDeployment) -> None:
    agent, prefix = two.agents["west"], prefix_of(_own_chain(), 327)
    before = agent.pool()["prefix"]
    await asyncio.to_thread(two.hands["east"].leave, prefix)
    assert (await two.copy(prefix, "east", "west")).outcome == "completed"
    await until(lambda: agent.pool()["transfer"] == agent.pool()["quarantined"] == 0, what="west's slots")
    assert agent.pool()["prefix"] == before + 11 + 3 + 1


@beside_others
async def test_copy_of_an_evicted_prefix_fails(two: AgentDeployment) -> None:
    chain = _own_chain()
    await asyncio.to_thread(two.hands["east"].leave, prefix_of(chain, 8 * BLOCK_TOKENS))
    end = await two.copy(prefix_of(chain, 327), "east", "west")
    assert (end.outcome, end.moved_bytes) == ("evicted", 0)


async def test_receiver_without_room_refuses_and_keeps_its_blocks(site: AgentDeployment) -> None:
    east, west = await site.node("east"), await site.node("west", **{"pool-bytes": "512KiB"})
    await asyncio.to_thread(east.leave, PREFIX)
    kept = prefix_of(chain_of(400, seed=1), 64)
    await asyncio.to_thread(west.leave, kept)
    end = await site.copy(PREFIX, "east", "west")
    assert (end.outcome, end.moved_bytes) == ("no_memory", 0)
    assert await asyncio.to_thread(west.holds, kept)


async def test_death_of_the_sender_ends_the_copy(deployment: Deployment, tmp_path: Path) -> None:
    async with running_agents(deployment, tmp_path, expiry_seconds=3.0) as site:
        east = await site.node("east")
        await asyncio.to_thread(east.leave, PREFIX)
        # No server listens there, so the copy cannot end by itself.
        with Relay("127.0.0.1:9") as relay:
            await site.node("west", advertise=relay.address)
            copying = asyncio.create_task(site.copy(PREFIX, "east", "west"))
            await until(lambda: len(site.manager.copies) == 1, what="the order")
            site.agents["east"].process.kill()
            assert (await copying).outcome == "unreachable"
        assert len(site.manager.copies) == 0


@beside_others
async def test_copies_by_nodes_or_of_unknown_nodes_are_refused(two: AgentDeployment) -> None:
    with pytest.raises(IndexRefusal) as refusal:
        await two.copy(PREFIX, "east", "west", name="west")
    assert refusal.value.reason == "unauthenticated"
    with pytest.raises(IndexRefusal) as unknown:
        await two.copy(PREFIX, "east", "north")
    assert unknown.value.reason == "unknown_node"
    bad = Prefix(PREFIX.model, PREFIX.units[:-1], PREFIX.num_tokens, PREFIX.end_hash)
    with pytest.raises(IndexRefusal) as alien:
        await two.copy(bad, "east", "west")
    assert alien.value.reason == "alien_hash"
