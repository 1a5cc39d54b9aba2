"""Pool changes of a node reach the answers, and stay correct through breaks."""

import asyncio
import itertools

import pytest
from prometheus_client import REGISTRY

from prfaas.errors import IndexRefusal
from prfaas.index.membership import EngineLoad, Figures
from prfaas.pool_events import BlockRemoved, BlockStored
from prfaas.rpc.channel import Channel
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.types import BlockHash, InstanceId
from tests.support.deployment import SECRET, Deployment, chain_of, hybrid_layout, removed, stored, until_usable, usable
from tests.support.waiting import PATIENCE_SECONDS, until

LAYOUT = hybrid_layout()
SHORT_EXPIRY_SECONDS = 1.0


async def test_stored_blocks_are_matched_and_removed_ones_are_not(deployment: Deployment) -> None:
    manager = await deployment.start_manager()
    reporter = await deployment.node("n1", manager)
    chain = chain_of(640)
    reporter.publish(stored(LAYOUT, chain, 320))
    await until(lambda: reporter.status.acknowledged >= 1)
    client = deployment.client(manager)
    assert await usable(client, chain) == {"n1": 320}
    reporter.publish(removed(LAYOUT, chain, 160))
    await until(lambda: reporter.status.acknowledged >= 2)
    assert await usable(client, chain) == {"n1": 0}, "the state at 320 lacks an attention block below it"


async def test_lost_block_is_found_by_the_digest(deployment: Deployment) -> None:
    manager = await deployment.start_manager()
    reporter = await deployment.node("n1", manager, holds=stored(LAYOUT, chain_of(320), 320))
    before = _num_resyncs()
    manager.world.index.reset(next(iter(manager.world.membership)).node.name)
    await until(lambda: reporter.status.num_full_announcements >= 1, what="the announcement of everything")
    client = deployment.client(manager)
    await until_usable(client, chain_of(640), {"n1": 320})
    assert _num_resyncs() > before


def _num_resyncs() -> float:
    return REGISTRY.get_sample_value("prfaas_manager_full_announcements_total", {"reason": "digest"}) or 0.0


async def test_silent_node_returns_with_its_blocks(deployment: Deployment) -> None:
    manager = await deployment.start_manager(expiry_seconds=SHORT_EXPIRY_SECONDS)
    reporter = deployment.reporter("n1", manager)
    running = deployment.run(reporter)
    reporter.publish(stored(LAYOUT, chain_of(320), 320))
    await until(lambda: reporter.status.acknowledged >= 1)
    await deployment.end(running)
    client = deployment.client(manager)
    await until_usable(client, chain_of(640), {})
    deployment.run(reporter)
    await until_usable(client, chain_of(640), {"n1": 320})
    assert reporter.status.num_full_announcements == 0, "the stream was resumed"


async def test_node_with_an_older_epoch_registers_after_the_expiry(deployment: Deployment) -> None:
    manager = await deployment.start_manager(expiry_seconds=SHORT_EXPIRY_SECONDS)
    former = deployment.reporter("n1", manager, epoch=1000)
    running = deployment.run(former)
    former.publish(stored(LAYOUT, chain_of(320), 320))
    await until(lambda: former.status.acknowledged >= 1)
    later = deployment.reporter("n1", manager, epoch=1)
    later.publish(stored(LAYOUT, chain_of(640, seed=1), 640))
    deployment.run(later)
    await deployment.end(running)
    await until_usable(deployment.client(manager), chain_of(656, seed=1), {"n1": 640})


async def test_node_may_not_report_for_another(deployment: Deployment) -> None:
    manager = await deployment.start_manager()
    await deployment.node("n1", manager)
    thief = Channel(manager.address, name="n2", secret=SECRET)
    request = pb.HeartbeatRequest(node="n1", epoch=1)
    with pytest.raises(IndexRefusal) as refusal:
        await thief.call("Heartbeat", request, timeout_seconds=PATIENCE_SECONDS)
    assert refusal.value.reason == "unauthenticated"
    await thief.close()


async def test_watchers_see_nodes_join_and_leave(deployment: Deployment) -> None:
    manager = await deployment.start_manager(expiry_seconds=SHORT_EXPIRY_SECONDS)
    client = deployment.client(manager)
    reporter = deployment.reporter("n1", manager)
    running = deployment.run(reporter)
    watching = client.watch_state()
    async with asyncio.timeout(PATIENCE_SECONDS):
        async for snapshot in watching:
            if [state.node.name for state in snapshot.nodes] == ["n1"]:
                break
        await deployment.end(running)
        async for snapshot in watching:
            if not snapshot.nodes:
                break
    await watching.aclose()


async def test_missing_tokens_are_counted_by_cluster(deployment: Deployment) -> None:
    manager = await deployment.start_manager()
    reporter = await deployment.node("n1", manager, cluster="honest")
    reporter.note_promise(predicted_tokens=320, found_tokens=320)
    reporter.note_promise(predicted_tokens=320, found_tokens=160)
    await until(lambda: _counted("prfaas_manager_promises_total", outcome="broken") == 1)
    assert _counted("prfaas_manager_promises_total", outcome="kept") == 1
    assert _counted("prfaas_manager_predicted_tokens_total", kind="found") == 480
    assert _counted("prfaas_manager_predicted_tokens_total", kind="missing") == 160


def _counted(metric: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(metric, {"cluster": "honest", **labels})


async def test_invalid_figure_ends_the_session_only(deployment: Deployment) -> None:
    manager = await deployment.start_manager()
    loads = itertools.chain([-1], itertools.repeat(1))

    def figures() -> Figures:
        return Figures(engines=(EngineLoad(InstanceId("n1-engine"), next(loads), 0, 0.0),))

    reporter = deployment.reporter("n1", manager, figures=figures)
    running = deployment.run(reporter)
    await until(lambda: running.done() or any(member.figures.engines for member in manager.world.membership))
    assert not running.done()


async def test_events_continue_after_an_invalid_one(deployment: Deployment) -> None:
    manager = await deployment.start_manager()
    reporter = await deployment.node("n1", manager)
    chain = chain_of(320)
    reporter.publish(stored(LAYOUT, chain, 320))
    await until(lambda: reporter.status.acknowledged >= 1)
    too_long = BlockStored(LAYOUT.fingerprint, 1, BlockHash(bytes(16)), chain.root, 1 << 40)
    reporter.publish([too_long])
    await until(lambda: reporter.status.sequence > 1, what="an attempt to send it")
    reporter.publish([BlockRemoved(LAYOUT.fingerprint, 1, too_long.block_hash)])
    reporter.publish(stored(LAYOUT, chain_of(640, seed=1), 640))
    await until_usable(deployment.client(manager), chain_of(656, seed=1), {"n1": 640})
