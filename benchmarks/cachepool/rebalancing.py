"""One prefix asked for a hundred times as often as the others, before six real agents: how soon and how calmly it spreads."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prfaas.hashing import HashChain
from prfaas.index.query import Query
from prfaas.manager.operations.rebalancer import INTAKE_RATIO
from prfaas.rpc.tasks import cancel_tasks
from prfaas.scheduler.rebalance import RebalanceLimits
from tests.support.agent_deployment import AgentDeployment
from tests.support.agents import Agents
from tests.support.deployment import MODEL, SECRET, Deployment, match_request
from tests.support.prefix_engine import chain_of, prefix_of, sizes

NUM_NODES = 5  # Another node joins later.
HOT_RATIO = 100
LENGTH = 320
PREFIX_BYTES = sizes(10, 2, 1)
EGRESS_BYTES_PER_SECOND = 1.0 * PREFIX_BYTES
INTAKE_BYTES_PER_SECOND = INTAKE_RATIO * EGRESS_BYTES_PER_SECOND
WATCH_SECONDS = 20.0  # Starts when the prefix has spread.
BAR_HOLDERS, BAR_SECONDS = 4, 30.0
HOT = chain_of(400)
OTHERS = [chain_of(400, seed=number) for number in range(1, 6)]


def measure() -> dict[str, Any]:
    """Return seconds until enough nodes hold it, and bytes against the budgets, from first question to end."""
    with TemporaryDirectory() as directory:
        return asyncio.run(_measure(Path(directory)))


async def _measure(directory: Path) -> dict[str, Any]:
    async with Deployment(directory) as deployment:
        manager = await deployment.start_manager(rebalance_bytes_per_second=EGRESS_BYTES_PER_SECOND)
        site = AgentDeployment(deployment, manager, Agents(directory, SECRET))
        try:
            return await _spread(site)
        finally:
            await site.close()


async def _spread(site: AgentDeployment) -> dict[str, Any]:
    for number in range(NUM_NODES):
        await site.node(f"n{number}")
    for chain in (HOT, *OTHERS):
        await asyncio.to_thread(site.hands["n0"].leave, prefix_of(chain, LENGTH))
    asking = asyncio.create_task(_ask(site))
    started = time.monotonic()
    try:
        seconds = await _until_spread(site, started)
        await site.node("fresh")
        joined = time.monotonic()
        await asyncio.sleep(WATCH_SECONDS)
        return await asyncio.to_thread(_figures, site, seconds, started, joined)
    finally:
        await cancel_tasks((asking,))


async def _ask(site: AgentDeployment) -> None:
    rounds = 0
    while True:
        rounds += 1
        for offset, chain in enumerate((HOT, *OTHERS)):
            if offset == 0 or rounds % HOT_RATIO == offset:
                await site.client.match(match_request(chain))
        await asyncio.sleep(0.01)


async def _until_spread(site: AgentDeployment, started: float) -> float:
    while len(_holders(site, HOT)) < BAR_HOLDERS:
        if time.monotonic() - started > 4 * BAR_SECONDS:
            raise TimeoutError(f"{len(_holders(site, HOT))} holders after {4 * BAR_SECONDS:.0f} s")
        await asyncio.sleep(0.05)
    return time.monotonic() - started


def _holders(site: AgentDeployment, chain: HashChain) -> set[str]:
    answer = site.manager.world.index.match(Query(MODEL, b"".join(chain.units), LENGTH))
    return {node.node for node in answer.nodes if node.usable_tokens == LENGTH}


def _figures(site: AgentDeployment, seconds: float, started: float, joined: float) -> dict[str, Any]:
    received = {name: _received(site, name) for name in site.agents}
    now, burst = time.monotonic(), RebalanceLimits(0.0, 0.0).burst_seconds
    return {
        "num_agents": len(site.agents),
        "seconds_to_4_holders": round(seconds, 2),
        "bar_seconds": BAR_SECONDS,
        "holders_at_the_end": len(_holders(site, HOT)),
        "watched_seconds": round(now - started, 1),
        "moved_bytes": sum(map(sum, received.values())),
        "egress_budget_bytes": round(EGRESS_BYTES_PER_SECOND * (now - started + burst)),
        "fresh_node_bytes": sum(received["fresh"]),
        "fresh_node_budget_bytes": round(INTAKE_BYTES_PER_SECOND * (now - joined)),
        "most_copies_to_one_node": max(map(len, received.values())),
        "prefixes_moved_that_are_not_hot": sum(len(_holders(site, chain)) - 1 for chain in OTHERS),
    }


def _received(site: AgentDeployment, name: str) -> list[int]:
    """Payload bytes of each copy that came to a node."""
    records = (transfer for transfer in site.agents[name].transfers() if transfer["direction"] == "in")
    return [int(str(record["payload_bytes"])) - int(str(record["held_bytes"])) for record in records]
