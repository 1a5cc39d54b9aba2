"""Pool orders of operators: pins keep prefixes, removals take effect everywhere, and others may not order."""

from __future__ import annotations

import asyncio

import pytest

from prfaas.errors import IndexRefusal
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.types import Prefix
from tests.support.agent_deployment import AgentDeployment
from tests.support.deployment import Deployment
from tests.support.prefix_engine import PrefixEngine, chain_of, prefix_of
from tests.support.waiting import PATIENCE_SECONDS, until

LENGTH = 64  # Two attention blocks, two window blocks and a state: a third of the memory.
NUM_OTHERS = 6
SMALL = {"pool-bytes": "1MiB"}


def _prefix(seed: int) -> Prefix:
    return prefix_of(chain_of(LENGTH + 1, seed=seed), LENGTH)


async def _order(
    site: AgentDeployment,
    order: str,
    prefix: Prefix,
    *,
    node: str = "a",
    who: str = "operator",
    seconds: float = PATIENCE_SECONDS,
) -> pb.OrderPoolResponse:
    request = pb.OrderPoolRequest(node=node, end_hash=prefix.end_hash, order=order, timeout_seconds=seconds)
    response: pb.OrderPoolResponse = await site.client_named(who).operate("OrderPool", request)
    return response


async def _fill(hand: PrefixEngine) -> None:
    """Leave more than memory holds."""
    for seed in range(100, 100 + NUM_OTHERS):
        await asyncio.to_thread(hand.leave, _prefix(seed))


async def _holds(hand: PrefixEngine, prefix: Prefix) -> bool:
    return await asyncio.to_thread(hand.holds, prefix)


async def test_pinned_prefix_stays_until_unpinned(site: AgentDeployment) -> None:
    hand = await site.node("a", **SMALL)
    await asyncio.to_thread(hand.leave, _prefix(1))
    pinned = await _order(site, "pin", _prefix(1))
    assert pinned.outcome == "completed" and pinned.held_bytes > 0
    await _fill(hand)
    assert await _holds(hand, _prefix(1))
    again = await _order(site, "pin", _prefix(1))
    assert (again.outcome, again.held_bytes) == ("completed", pinned.held_bytes)
    assert (await _order(site, "unpin", _prefix(1))).outcome == "completed"
    await _fill(hand)
    assert not await _holds(hand, _prefix(1))


async def test_removed_prefix_leaves_memory_ssd_and_index(
    site: AgentDeployment, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = str(tmp_path_factory.mktemp("ssd"))
    hand = await site.node("a", **{"ssd-directory": directory})
    for seed in (1, 2):
        await asyncio.to_thread(hand.leave, _prefix(seed))
    await until(lambda: site.manager.world.index.num_blocks() == 5 * 2 * 2, what="both prefixes in both tiers")
    await _order(site, "pin", _prefix(1))
    removed = await _order(site, "remove", _prefix(1))
    assert removed.outcome == "completed" and removed.removed_bytes > removed.held_bytes > 0
    await until(lambda: site.manager.world.index.num_blocks() == 5 * 2, what="one prefix in both tiers")
    assert not await _holds(hand, _prefix(1))
    assert await _holds(hand, _prefix(2))


@pytest.mark.soak
async def test_removal_includes_longer_prefixes_only(
    site: AgentDeployment, tmp_path_factory: pytest.TempPathFactory
) -> None:
    hand = await site.node("a", **{"ssd-directory": str(tmp_path_factory.mktemp("ssd"))})
    short, middle, long = (prefix_of(chain_of(257), length) for length in (64, 96, 256))
    for prefix in (short, middle, long):
        await asyncio.to_thread(hand.leave, prefix)
    await until(lambda: site.manager.world.index.num_blocks() == (8 + 5 + 3) * 2, what="all of it in both tiers")
    removed = await _order(site, "remove", middle)
    assert removed.outcome == "completed"
    await until(lambda: site.manager.world.index.num_blocks() == (2 + 2 + 1) * 2, what="the short one in both tiers")
    assert [await _holds(hand, prefix) for prefix in (short, middle, long)] == [True, False, False]


async def test_orders_without_holder_or_answer_fail_with_a_reason(
    site: AgentDeployment, deployment: Deployment
) -> None:
    await site.node("a")
    assert (await _order(site, "pin", _prefix(1))).outcome == "evicted"
    deployment.run(deployment.reporter("deaf", site.manager))
    await until(lambda: any(member.node.name == "deaf" for member in site.manager.world.live()), what="deaf")
    assert (await _order(site, "pin", _prefix(1), node="deaf", seconds=0.3)).outcome == "deadline"


async def test_only_operators_give_orders_and_malformed_ones_are_refused(site: AgentDeployment) -> None:
    await site.node("a")
    with pytest.raises(IndexRefusal, match="is not an operator"):
        await _order(site, "pin", _prefix(1), who="router")
    with pytest.raises(IndexRefusal, match="order 'polish'"):
        await _order(site, "polish", _prefix(1))
    with pytest.raises(IndexRefusal, match="end_hash: 3 bytes"):
        await _order(site, "pin", Prefix("tiny", b"", 0, _prefix(1).end_hash[:3]))  # type: ignore[arg-type]
    with pytest.raises(IndexRefusal, match="unknown or silent"):
        await _order(site, "pin", _prefix(1), node="nobody")
