"""Role orders of operators: running requests finish first, and impossible orders are refused."""

import asyncio

import pytest
from prometheus_client import REGISTRY

from prfaas.errors import IndexRefusal, ManagerUnreachable
from prfaas.index.membership import EngineLoad, Figures
from prfaas.index.store.redis_store import RedisStore
from prfaas.manager.daemon import Manager
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.types import ClusterKind, ClusterName, InstanceId, InstanceRole
from tests.support.deployment import Deployment
from tests.support.waiting import PATIENCE_SECONDS, until


def roles(manager: Manager) -> dict[str, str]:
    return {engine.instance: engine.role for member in manager.world.live() for engine in member.node.engines}


async def node(
    deployment: Deployment, manager: Manager, name: str, role: InstanceRole, *, kind: ClusterKind = "pd"
) -> None:
    cluster = "east" if kind == "prfaas" else "west"
    await deployment.node(name, manager, cluster=cluster, kind=kind, role=role)


async def order(
    deployment: Deployment, manager: Manager, name: str, role: str, *, seconds: float = 0.0, who: str = "operator"
) -> list[tuple[str, str, str, int]]:
    """Return the changes, each with the requests that were left, or -1 if unknown."""
    request = pb.SetRoleRequest(node=name, role=role, timeout_seconds=seconds)
    response = await deployment.client(manager, name=who).operate("SetRole", request)
    return [
        (change.instance, change.before, change.after, -1 if change.is_load_unknown else change.num_requests_left)
        for change in response.changes
    ]


def num_actions(outcome: str) -> float:
    labels = {"action": "set_role", "outcome": outcome}
    return REGISTRY.get_sample_value("prfaas_manager_admin_actions_total", labels) or 0.0


async def test_ordered_role_survives_the_manager(deployment: Deployment) -> None:
    await deployment.start_redis()
    first = await deployment.start_manager()
    await node(deployment, first, "n1", "decode")
    await node(deployment, first, "n2", "decode")
    assert await order(deployment, first, "n1", "prefill") == [("n1-engine", "decode", "prefill", -1)]
    assert roles(first) == {"n1-engine": "prefill", "n2-engine": "decode"}
    await deployment.stop_manager(first)
    second = await deployment.start_manager(listen=first.address)
    await until(
        lambda: roles(second) == {"n1-engine": "prefill", "n2-engine": "decode"}, what="the order in the record"
    )
    assert await order(deployment, second, "n1", "announced") == [("n1-engine", "prefill", "decode", -1)]
    assert roles(second) == {"n1-engine": "decode", "n2-engine": "decode"}


async def test_node_gets_no_requests_until_it_is_idle(deployment: Deployment) -> None:
    manager = await deployment.start_manager()
    loads = {"running": 1}

    def figures() -> Figures:
        return Figures(engines=(EngineLoad(InstanceId("n1-engine"), loads["running"], 0, 0.0),))

    deployment.run(deployment.reporter("n1", manager, cluster="west", role="decode", figures=figures))
    await node(deployment, manager, "n2", "both")
    await until(lambda: any(member.figures.engines for member in manager.world.live()), what="a reported load")
    ordered = asyncio.create_task(order(deployment, manager, "n1", "prefill", seconds=PATIENCE_SECONDS))
    await until(lambda: manager.world.draining == {"n1-engine"}, what="the drain")
    assert roles(manager)["n1-engine"] == "decode"
    loads["running"] = 0
    assert await ordered == [("n1-engine", "decode", "prefill", 0)]
    assert not manager.world.draining


async def test_routers_of_other_managers_send_no_requests_either(deployment: Deployment) -> None:
    redis = await deployment.start_redis()
    busy = Figures(engines=(EngineLoad(InstanceId("n1-engine"), 1, 0, 0.0),))
    first, second = await deployment.start_manager(), await deployment.start_manager()
    deployment.run(deployment.reporter("n1", first, cluster="west", role="decode", figures=busy))
    await node(deployment, first, "n2", "both")
    await until(lambda: any(member.figures.engines for member in first.world.live()), what="a reported load")
    ordered = asyncio.create_task(order(deployment, first, "n1", "prefill", seconds=PATIENCE_SECONDS))
    await until(lambda: second.service.state(index_stale=False).resting_instances == ["n1-engine"], what="the news")
    await deployment.stop_manager(first)
    with pytest.raises((IndexRefusal, ManagerUnreachable)):
        await ordered
    store = RedisStore(redis.url)
    await store._client.delete(store.keys.figures(ClusterName("west")))  # As Redis does when they expire.
    await store.close()
    await until(lambda: not second.world.draining, what="the end of an order whose manager has ended")


async def test_order_that_would_break_a_cluster_is_refused(deployment: Deployment) -> None:
    manager = await deployment.start_manager()
    await node(deployment, manager, "n1", "both")
    await node(deployment, manager, "e1", "prefill", kind="prfaas")
    for name, role, message in (
        ("n1", "prefill", "no instance of west would decode"),
        ("e1", "decode", "all instances prefill"),
        ("n1", "leader", "role"),
        ("nobody", "decode", "unknown or silent"),
    ):
        before = num_actions("failed")
        with pytest.raises(IndexRefusal, match=message):
            await order(deployment, manager, name, role)
        assert num_actions("failed") == before + 1
    assert roles(manager) == {"n1-engine": "both", "e1-engine": "prefill"}
