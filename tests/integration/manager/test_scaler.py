"""KEDA gets the instances that the measured arrivals need from any manager."""

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from prometheus_client import REGISTRY

from prfaas.manager.api.gauges import refresh_gauges
from prfaas.manager.daemon import Manager
from prfaas.model.planning.fleet import Demand
from prfaas.model.planning.planner import best_plan
from prfaas.solve.files.deployment_file import read_deployment
from prfaas.solve.files.traces import find_trace
from tests.integration.manager.test_planning import FILE, _node
from tests.support.deployment import Deployment
from tests.support.keda import KedaClient
from tests.support.waiting import until

MEASURED_SECONDS = 250.0


@pytest.fixture
async def manager(deployment: Deployment, tmp_path: Path) -> Manager:
    file = tmp_path / "deployment.yaml"
    file.write_text(FILE)
    return await deployment.start_manager(deployment=file)


@pytest.fixture
async def channel(manager: Manager) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(manager.address) as opened:
        yield opened


async def _plan_for(deployment: Deployment, manager: Manager, requests_per_second: float) -> None:
    """Let routers have reported so many requests, and wait for the plan that counts them."""
    traffic = manager.routing.traffic
    traffic.note_reports(round(requests_per_second * MEASURED_SECONDS), time.monotonic() - MEASURED_SECONDS)
    for name in ("p1", "i1", "d1"):
        await _node(deployment, name, manager)
    await until(
        lambda: manager.world.plan is not None and bool(manager.world.plan.needed_instances), what="the needed fleet"
    )


async def test_keda_scales_each_cluster_and_role_to_the_plans_need(
    deployment: Deployment, manager: Manager, channel: grpc.aio.Channel
) -> None:
    await _plan_for(deployment, manager, 2.0)
    assert manager.world.plan is not None
    needed = manager.world.plan.needed_instances
    assert needed["pd"]["decode"] > 1
    for cluster, counts in needed.items():
        for role, count in counts.items():
            client = KedaClient(channel, cluster=cluster, role=role)
            assert await client.replicas() == count
            assert await client.is_active() == await client.stream_is_active() == (count > 0)
    refresh_gauges(manager.world, paths=manager.paths, routing=manager.routing, replication=manager.replication)
    values = manager.world.plan.resource_values
    assert values["instance:pd"] > 0
    for resource, value in values.items():
        assert REGISTRY.get_sample_value("prfaas_manager_resource_value", {"resource": resource}) == value
    machines = KedaClient(channel, cluster="pd", instancesPerReplica="2")
    assert await machines.replicas() == sum(needed["pd"].values()) / 2


async def test_each_of_several_pd_clusters_has_a_need_that_sustains_the_arrivals(
    deployment: Deployment, tmp_path: Path
) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(FILE + "  - {name: north, profile: h20-internal-1t, instances: 6}\n")
    manager = await deployment.start_manager(deployment=file)
    await _plan_for(deployment, manager, 2.0)
    async with grpc.aio.insecure_channel(manager.address) as channel:
        needed = {name: await KedaClient(channel, cluster=name).replicas() for name in ("prfaas", "pd", "north")}
    listed, written = read_deployment(file)
    workload = find_trace(written.trace, beside=None)

    def sustained(**changes: float) -> float:
        counts = {name: int(needed[name] + changes.get(name, 0)) for name in needed}
        prfaas = [replace(item, num_instances=counts[item.name]) for item in listed.prfaas if counts[item.name]]
        pd = tuple(replace(item, num_instances=counts[item.name]) for item in listed.pd)
        return best_plan(replace(listed, prfaas=tuple(prfaas), pd=pd), workload).system_throughput

    capacity = Demand(2.0).capacity
    assert sustained() >= capacity
    assert all(sustained(**{name: -1}) < capacity for name, count in needed.items() if count > 1), needed


async def test_more_arrivals_need_more_instances(deployment: Deployment, manager: Manager) -> None:
    await _plan_for(deployment, manager, 0.5)
    assert manager.world.plan is not None
    few = manager.world.plan
    manager.routing.traffic.note_reports(round(2.5 * MEASURED_SECONDS), time.monotonic())
    await _node(deployment, "d2", manager)  # A new node makes a new plan due at once.
    await until(lambda: manager.world.plan is not few, what="a new plan")
    more = manager.world.plan.needed_instances
    assert sum(more["pd"].values()) > sum(few.needed_instances["pd"].values())


async def test_an_unknown_need_is_an_error_so_that_keda_keeps_its_replicas(
    deployment: Deployment, manager: Manager, channel: grpc.aio.Channel
) -> None:
    client = KedaClient(channel, cluster="pd", role="decode")
    with pytest.raises(grpc.aio.AioRpcError) as unplanned:
        await client.replicas()
    for name in ("i1", "d1"):
        await _node(deployment, name, manager)
    await until(lambda: manager.world.plan is not None, what="a plan without arrivals")
    with pytest.raises(grpc.aio.AioRpcError) as unmeasured:
        await client.is_active()
    assert unplanned.value.code() is unmeasured.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        ({}, "cluster"),
        ({"cluster": "none"}, "cluster"),
        ({"cluster": "pd", "role": "both"}, "role"),
        ({"cluster": "pd", "instancesPerReplica": "0"}, "instancesPerReplica"),
    ],
)
async def test_wrong_metadata_is_refused_by_its_key(
    deployment: Deployment, manager: Manager, channel: grpc.aio.Channel, metadata: dict[str, str], key: str
) -> None:
    await _plan_for(deployment, manager, 2.0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await KedaClient(channel, **metadata).replicas()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(refused.value.details()).startswith(key)
