"""Who may be asked, as instances come, rest, fail and go."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import aiohttp
import pytest

from prfaas.hashing import HashChain
from prfaas.router.config import ClusterConfig, InstanceConfig, RouterConfig
from prfaas.router.engines.fleet import Fleet, Instance, InstanceAddress
from prfaas.router.engines.legs import LegClient, LegFailed
from prfaas.router.openai.tokenizer import TokenizedPrompt
from prfaas.router.routing.decide import DecisionMaker, ManagerDecision, RoutingRequest
from prfaas.scheduler.snapshot import RequestFacts
from prfaas.types import AgentName, ClusterName, InstanceId


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
async def test_the_resting_are_asked_when_nobody_else_of_their_cluster_decodes(
    session: aiohttp.ClientSession, resting: set[str]
) -> None:
    fleet = _fleet(session, "x", "y", own="x")
    fleet.resting = frozenset(map(InstanceId, resting))
    assert [instance.instance for instance in fleet.snapshot().instances] == ["x/0"]


@pytest.fixture
def switched_off() -> Iterator[str]:
    """URL of a host that answers no attempt to connect: its queue of those is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, socket.create_connection(server.getsockname()):
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        for one in waiting:
            one.close()


async def test_a_host_that_is_switched_off_is_unreachable(session: aiohttp.ClientSession, switched_off: str) -> None:
    fleet = _fleet(session, "x", url=switched_off)
    legs = LegClient(session, prefill_seconds=60.0)
    (instance,) = fleet
    for leg in (legs.decode(instance, "/v1/completions", b"{}", {}), legs.prefill(instance, b"{}", {})):
        instance.healthy = True
        with pytest.raises(LegFailed) as failed:
            await leg
        assert failed.value.reason in ("decode_unreachable", "prefill_unreachable") and not instance.healthy


class _Leaving:
    """A manager that does not answer while an instance leaves."""

    def __init__(self, fleet: Fleet, stays: Instance) -> None:
        self._fleet, self._stays = fleet, stays

    async def route(self, model: str, chain: HashChain, ask: RoutingRequest) -> ManagerDecision | None:
        self._fleet.update([self._stays.address])
        return None


@pytest.mark.parametrize("stays", ["x/0", "y/0"])
async def test_an_instance_that_leaves_while_the_manager_is_asked_is_not_chosen(
    session: aiohttp.ClientSession, stays: str
) -> None:
    fleet = _fleet(session, "x", "y")
    manager = _Leaving(fleet, fleet[InstanceId(stays)])
    deciding = DecisionMaker(_config("x", "y"), b"s" * 32, fleet, manager)
    ask = RoutingRequest(RequestFacts(20_000), None, TokenizedPrompt(list(range(20_000))), session="s")
    assert (await deciding.plan(ask)).decision.decode == stays


async def test_known_instances_keep_what_is_known_of_them(session: aiohttp.ClientSession) -> None:
    fleet = _fleet(session, "x")
    (before,) = fleet
    address = before.address
    fleet.update([address])
    assert next(iter(fleet)) is before
    turned = replace(address, role="prefill", wire="127.0.0.1:3")
    fleet.update([turned])
    assert next(iter(fleet)) is before and before.healthy and before.address == turned
    moved = InstanceAddress(
        address.name, "http://127.0.0.1:9", "decode", AgentName("x"), "127.0.0.1:2", ClusterName("x"), "pd"
    )
    fleet.update([moved])
    assert not next(iter(fleet)).healthy
