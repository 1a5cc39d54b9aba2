"""Rebalancing copies hot prefixes to more nodes within its budgets, and drained nodes copy theirs first."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prfaas.errors import IndexRefusal
from prfaas.hashing import HashChain
from prfaas.index.query import Query
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.scheduler.rebalance import RebalanceLimits
from tests.support.agent_deployment import AgentDeployment, running_agents
from tests.support.deployment import MODEL, Deployment, match_request
from tests.support.prefix_engine import chain_of, prefix_of, sizes
from tests.support.waiting import PATIENCE_SECONDS, until

HOT = chain_of(400)
RARE = [chain_of(400, seed=number) for number in range(1, 6)]
LENGTH = 320
PREFIX_BYTES = sizes(10, 2, 1)
HOT_SHARE = 100  # Requests for the hot prefix per request for another one.
BURST_SECONDS = RebalanceLimits(0.0, 0.0).burst_seconds


class _Asking:
    """Clients that ask for prefixes until the test ends, each at its share."""

    def __init__(self, site: AgentDeployment, chains: dict[int, HashChain]) -> None:
        """`chains[n]` is asked for at every n-th round."""
        self._site = site
        self._chains = chains
        self.num_rounds = 0

    async def run(self) -> None:
        while True:
            self.num_rounds += 1
            for every, chain in self._chains.items():
                if self.num_rounds % every == 0:
                    await self._site.client.match(match_request(chain))
            await asyncio.sleep(0.01)


@asynccontextmanager
async def _asking(site: AgentDeployment, chains: dict[int, HashChain]) -> AsyncIterator[_Asking]:
    asking = _Asking(site, chains)
    task = asyncio.create_task(asking.run())
    try:
        yield asking
    finally:
        await Deployment.end(task)


def _holders(site: AgentDeployment, chain: HashChain) -> set[str]:
    """The nodes that hold the prefix, without asking for it as a client does."""
    answer = site.manager.world.index.match(Query(MODEL, b"".join(chain.units), LENGTH))
    return {node.node for node in answer.nodes if node.usable_tokens == LENGTH}


async def _until_held_by(site: AgentDeployment, chain: HashChain, num_nodes: int) -> None:
    await until(lambda: len(_holders(site, chain)) >= num_nodes, what=f"{num_nodes} holders")


def _received(site: AgentDeployment, name: str) -> list[int]:
    """Payload bytes of each copy that came to a node."""
    records = (transfer for transfer in site.agents[name].transfers() if transfer["direction"] == "in")
    return [int(str(record["payload_bytes"])) - int(str(record["held_bytes"])) for record in records]


async def test_only_the_hot_prefix_spreads(deployment: Deployment, tmp_path: Path) -> None:
    rate = 3.0 * PREFIX_BYTES
    async with running_agents(deployment, tmp_path, rebalance_bytes_per_second=rate) as site:
        names = [f"n{number}" for number in range(5)]
        await asyncio.gather(*map(site.node, names))
        for chain in (HOT, *RARE):
            await asyncio.to_thread(site.hands["n0"].leave, prefix_of(chain, LENGTH))
        await _until_held_by(site, HOT, 1)
        started = time.monotonic()
        chains = {1: HOT, **{HOT_SHARE + offset: chain for offset, chain in enumerate(RARE)}}
        async with _asking(site, chains) as asking:
            await _until_held_by(site, HOT, 4)
            rounds = asking.num_rounds
            await until(lambda: asking.num_rounds >= rounds + 2 * HOT_SHARE, what="further questions")
        received = {name: _received(site, name) for name in names}
        assert received["n0"] == []
        assert all(copies in ([], [PREFIX_BYTES]) for copies in received.values()), "each node gets it once"
        total = sum(map(sum, received.values()))
        assert total <= rate * (time.monotonic() - started + BURST_SECONDS)
        for chain in RARE:
            assert _holders(site, chain) == {"n0"}
        for name in _holders(site, HOT):
            assert await asyncio.to_thread(site.hands[name].holds, prefix_of(HOT, LENGTH))


async def test_draining_node_copies_hot_prefixes_and_gets_no_requests(site: AgentDeployment) -> None:
    async with TestServer(_idle_engine()) as engine:
        url = str(engine.make_url(""))
        for name in ("a", "b"):
            await site.node(name, engines=_engine(name, url=url))
        await site.node("c", engines=_engine("c"))
        await _is_drained(site)


async def _is_drained(site: AgentDeployment) -> None:
    for chain in (HOT, RARE[0], RARE[1]):
        await asyncio.to_thread(site.hands["a"].leave, prefix_of(chain, LENGTH))
    await asyncio.to_thread(site.hands["b"].leave, prefix_of(RARE[1], LENGTH))
    await _until_held_by(site, RARE[1], 2)
    for chain in (HOT, RARE[1]):
        await site.client.match(match_request(chain))
    assert (await site.client.route(_route())).decode.node == "a"
    operator = site.client_named("operator")
    drained = await operator.operate("Drain", pb.DrainRequest(node="a", timeout_seconds=PATIENCE_SECONDS))
    assert (drained.num_prefixes, drained.moved_bytes) == (1, PREFIX_BYTES)
    assert (drained.num_requests_left, drained.num_engines_unknown) == (0, 0)
    await _until_held_by(site, HOT, 2)
    assert _holders(site, RARE[0]) == {"a"}, "nobody asked for it"
    assert (await site.client.route(_route())).decode.node in _holders(site, HOT) - {"a"}
    again = await operator.operate("Drain", pb.DrainRequest(node="a", timeout_seconds=PATIENCE_SECONDS))
    assert again.num_prefixes == 0
    silent = await operator.operate("Drain", pb.DrainRequest(node="c", timeout_seconds=0.0))
    assert silent.num_engines_unknown == 1, "nobody says what c's engine runs"
    with pytest.raises(IndexRefusal, match="no other node decodes"):
        await operator.operate("Drain", pb.DrainRequest(node="b"))
    with pytest.raises(IndexRefusal):
        await operator.operate("Drain", pb.DrainRequest(node="nobody"))


def _engine(name: str, *, url: str = "http://127.0.0.1:9") -> str:
    return f"[{{instance: {name}-engine, url: '{url}', role: both, model: {MODEL}}}]"


def _idle_engine() -> web.Application:
    """Serve an engine's load to its agent."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n")

    application = web.Application()
    application.router.add_get("/{name:health|metrics}", page)
    return application


def _route() -> pb.RouteRequest:
    return pb.RouteRequest(
        model=MODEL, units=b"".join(HOT.units), num_prompt_tokens=400, prompt_hash=HOT.at(399), cluster="pd"
    )
