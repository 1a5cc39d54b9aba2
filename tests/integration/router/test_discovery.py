"""Instances that the router finds by itself: agents behind a DNS name, and behind Kubernetes labels."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from prfaas.errors import ConfigError
from prfaas.router.config import DiscoveryConfig
from prfaas.router.engines.discovery import Discovery
from prfaas.router.engines.fleet import InstanceAddress
from prfaas.router.server import serve_app
from tools.processes import Children
from tools.stack import Stack

TOKEN = "t" * 40
NODE = {
    "name": "west-1",
    "cluster": "west",
    "cluster_kind": "pd",
    "wire_address": "10.0.0.5:7400",
    "engines": [{"instance": "west-1/0", "url": "http://10.0.0.5:8000", "role": "decode"}],
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Found:
    """What a router was told last, and how often."""

    def __init__(self) -> None:
        self.told: list[list[InstanceAddress]] = []

    def __call__(self, addresses: Sequence[InstanceAddress]) -> None:
        self.told.append(list(addresses))

    @property
    def names(self) -> list[str]:
        return [its.name for its in self.told[-1]]


@contextlib.asynccontextmanager
async def serving(pages: Mapping[str, Any], *, token: str = "") -> AsyncIterator[str]:
    """host:port of a server with these JSON pages, of which a page that is bytes goes out as it is."""

    async def answer(request: web.Request) -> web.Response:
        if token and request.headers.get("Authorization") != f"Bearer {token}":
            return web.Response(status=401)
        page = pages[request.path_qs]
        return web.Response(body=page) if isinstance(page, bytes) else web.json_response(page)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with serve_app(app, "127.0.0.1:0") as address:
        yield address


@contextlib.asynccontextmanager
async def discovering(config: DiscoveryConfig, found: Found, clock: Clock) -> AsyncIterator[Discovery]:
    async with aiohttp.ClientSession() as session:
        yield Discovery(config, session=session, tls=None, found=found, clock=clock)


async def test_engines_beside_the_agents_behind_a_name_are_found_once_and_leave_after_the_expiry() -> None:
    found, clock, pages = Found(), Clock(), {"/node": NODE}
    async with serving(pages) as address:
        port = address.rpartition(":")[2]
        config = DiscoveryConfig(names=(f"localhost:{port}",), expiry=30.0)
        async with discovering(config, found, clock) as discovery:
            await discovery.look()
            await discovery.look()
            assert found.names == ["west-1/0"] and len(found.told) == 1
            assert found.told[0][0].wire == "10.0.0.5:7400" and found.told[0][0].role == "decode"
            del pages["/node"]
            clock.now = 29.0
            await discovery.look()
            assert len(found.told) == 1  # one failed answer is no departure
            clock.now = 31.0
            await discovery.look()
            assert found.told[-1] == []


async def test_a_name_that_does_not_resolve_and_an_answer_that_is_no_node_are_passed_over() -> None:
    found = Found()
    for page in (b"not JSON", b'{"name": 1}', json.dumps({**NODE, "cluster_kind": "other"}).encode()):
        async with serving({"/node": page}) as address:
            config = DiscoveryConfig(names=("no-such-name.invalid:7401", address))
            async with discovering(config, found, Clock()) as discovery:
                await discovery.look()
    assert found.told == []


async def test_what_a_real_agent_says_of_itself_is_enough(tmp_path: Path) -> None:
    engine = {"instance": "e/0", "url": "http://127.0.0.1:1", "role": "both", "model": "m"}
    with Children(tmp_path) as children:
        stack = Stack(children, tmp_path)
        agent = stack.start_agent("east", cluster="far", cluster_kind="prfaas", engines=[engine])
        stack.await_agent(agent)
        found = Found()
        page = agent.status_url.removeprefix("http://")
        async with discovering(DiscoveryConfig(names=(page,)), found, Clock()) as discovery:
            await discovery.look()
        (its,) = found.told[0]
        assert (its.name, its.role, its.agent, its.cluster, its.cluster_kind) == (
            "e/0",
            "both",
            "east",
            "far",
            "prfaas",
        )
        assert its.wire == agent.wire


def _account(directory: Path, token: str = TOKEN) -> Path:
    (directory / "token").write_text(f"{token}\n")
    (directory / "namespace").write_text("models")
    return directory


def _pod(address: str, phase: str = "Running") -> dict[str, Any]:
    """Return a pod as the API server lists it, with some of what a router does not read."""
    return {"metadata": {"name": "x", "labels": {"app": "agent"}}, "status": {"phase": phase, "podIP": address}}


async def test_running_pods_of_the_namespace_with_the_labels_are_asked(tmp_path: Path) -> None:
    agents = {"/node": NODE}
    async with serving(agents) as agent:
        host, _, port = agent.rpartition(":")
        gone = [_pod("127.9.9.9", "Failed")] * 20_000  # a list that comes in many pieces
        pods = {"kind": "PodList", "items": [*gone, _pod(host), _pod("", "Pending")]}
        path = "/api/v1/namespaces/models/pods?labelSelector=app%3Dagent"
        async with serving({path: pods}, token=TOKEN) as api:
            config = DiscoveryConfig(
                kubernetes_selector="app=agent",
                kubernetes_port=int(port),
                kubernetes_api=f"http://{api}",
                kubernetes_account=_account(tmp_path),
            )
            found, clock = Found(), Clock()
            async with discovering(config, found, clock) as discovery:
                await discovery.look()
                assert found.names == ["west-1/0"]
                (tmp_path / "token").write_text("another")
                clock.now = 31.0
                await discovery.look()  # refused: the agents that were named last are asked
                assert len(found.told) == 1
                del agents["/node"]
                clock.now = 62.0
                await discovery.look()
                assert found.names == []


async def test_outside_of_kubernetes_the_settings_must_say_where_its_api_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with aiohttp.ClientSession() as session:
        for config, field in (
            (DiscoveryConfig(kubernetes_selector="a=b", kubernetes_account=_account(tmp_path)), "kubernetes_api"),
            (
                DiscoveryConfig(
                    kubernetes_selector="a=b", kubernetes_api="http://127.0.0.1:1", kubernetes_account=tmp_path / "none"
                ),
                "kubernetes_account",
            ),
        ):
            with pytest.raises(ConfigError, match=f"discovery.{field}"):
                Discovery(config, session=session, tls=None, found=Found(), clock=Clock())
