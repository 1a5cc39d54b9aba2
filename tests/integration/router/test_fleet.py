"""Fleet of instances that come, rest, fail and leave."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import aiohttp
import pytest

from prfaas.hashing import HashChain
from prfaas.router.config import ClusterConfig, InstanceConfig, RouterConfig
from prfaas.router.engines.fleet import Fleet, Instance
from prfaas.router.engines.legs import LegClient, LegFailed
from prfaas.router.routing.decide import DecisionMaker
from prfaas.router.routing.manager_client import DecisionClient
from prfaas.router.routing.plan import RoutePlan, RoutingRequest
from prfaas.scheduler.snapshot import RequestFacts, Snapshot
from prfaas.types import InstanceId


def _config(*clusters: str, own: str = "", url: str = "http://127.0.0.1:1") -> RouterConfig:
    return RouterConfig(
        secret_file="secret",
        cluster=own,
        clusters=tuple(
            ClusterConfig(
                name=name,
                kind="pd",
                instances=(InstanceConfig(name=f"{name}/0", url=url, role="decode", agent=name, wire="127.0.0.1:2"),),
            )
            for name in clusters
        ),
    )


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=0.2)) as opened:
        yield opened


def _fleet(session: aiohttp.ClientSession, *clusters: str, own: str = "", url: str = "http://127.0.0.1:1") -> Fleet:
    fleet = Fleet(_config(*clusters, own=own, url=url), session)
    for instance in fleet:
        instance.healthy = True
    return fleet


@pytest.mark.parametrize("resting", [{"x/0"}, {"x/0", "y/0"}])
async def test_resting_instances_are_used_if_no_other_of_their_cluster_decodes(
    session: aiohttp.ClientSession, resting: set[str]
) -> None:
    fleet = _fleet(session, "x", "y", own="x")
    fleet.resting = frozenset(map(InstanceId, resting))
    assert [instance.instance for instance in fleet.snapshot().instances] == ["x/0"]


@pytest.fixture
def switched_off() -> Iterator[str]:
    """URL of a host that answers no attempt to connect, because its queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, socket.create_connection(server.getsockname()):
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        for client in waiting:
            client.close()


async def test_host_without_power_is_unreachable(session: aiohttp.ClientSession, switched_off: str) -> None:
    fleet = _fleet(session, "x", url=switched_off)
    legs = LegClient(session, prefill_seconds=60.0)
    (instance,) = fleet
    for leg in (legs.decode(instance, "/v1/completions", b"{}", {}), legs.prefill(instance, b"{}", {})):
        instance.healthy = True
        with pytest.raises(LegFailed) as failed:
            await leg
        assert failed.value.reason in ("decode_unreachable", "prefill_unreachable") and not instance.healthy


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_pause_of_the_router_itself_is_no_fault_of_an_engine(
    session: aiohttp.ClientSession, switched_off: str, leg: str
) -> None:
    (instance,) = _fleet(session, "x", url=switched_off)
    legs = LegClient(session, prefill_seconds=60.0)
    path = ["/v1/completions"] if leg == "decode" else []
    asking = asyncio.create_task(getattr(legs, leg)(instance, *path, b"{}", {}))
    await asyncio.sleep(0.1)  # The attempt to connect is under way.
    time.sleep(1.0)  # noqa: ASYNC251 - the pause is what is tested
    with pytest.raises(LegFailed) as failed:
        await asking
    assert failed.value.reason == f"{leg}_unreachable" and instance.healthy


class _ManagerDuringDeparture(DecisionClient):
    """Manager that does not answer while all instances but one leave."""

    def __init__(self, fleet: Fleet, remaining: Instance) -> None:
        self._fleet, self._remaining = fleet, remaining

    async def decide(
        self, model: str, chain: HashChain, routing: RoutingRequest, snapshot: Snapshot
    ) -> RoutePlan | None:
        self._fleet.update([self._remaining.address])
        return None


@pytest.mark.parametrize("remaining", ["x/0", "y/0"])
async def test_instance_that_leaves_during_the_managers_decision_is_not_chosen(
    session: aiohttp.ClientSession, remaining: str
) -> None:
    fleet = _fleet(session, "x", "y")
    manager = _ManagerDuringDeparture(fleet, fleet[InstanceId(remaining)])
    decisions = DecisionMaker(_config("x", "y"), b"s" * 32, fleet, manager)
    request = RoutingRequest(RequestFacts(20_000), None, list(range(20_000)), session="s")
    assert (await decisions.plan(request)).decision.decode == remaining


async def test_instance_keeps_its_state_until_its_url_changes(session: aiohttp.ClientSession) -> None:
    fleet = _fleet(session, "x")
    (before,) = fleet
    address = before.address
    changed = replace(address, role="prefill", wire="127.0.0.1:3")
    for same_url in (address, changed):
        fleet.update([same_url])
        assert next(iter(fleet)) is before and before.healthy and before.address == same_url
    fleet.update([replace(address, url="http://127.0.0.1:9")])
    assert not next(iter(fleet)).healthy
