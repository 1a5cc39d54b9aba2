"""Discovery of instances: agents behind a DNS name, and behind Kubernetes labels."""

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
from prfaas.router.engines import discovery as engines_discovery
from prfaas.router.engines.discovery import EXPIRY_SECONDS, Discovery, KubernetesPods, ServiceAccount
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


class Reports:
    """Changes of the fleet that the discovery reported."""

    def __init__(self) -> None:
        self.all: list[list[InstanceAddress]] = []

    def __call__(self, addresses: Sequence[InstanceAddress]) -> None:
        self.all.append(list(addresses))

    @property
    def latest_names(self) -> list[str]:
        return [address.name for address in self.all[-1]]


@contextlib.asynccontextmanager
async def serve_pages(pages: Mapping[str, Any], *, token: str = "") -> AsyncIterator[str]:
    """Serve JSON pages, and yield the address. A page of bytes is sent as it is."""

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
async def discover(
    *names: str, account: ServiceAccount | None = None, port: int = 0, clock: Clock | None = None
) -> AsyncIterator[tuple[Discovery, Reports]]:
    """Yield a discovery of agents behind names, and behind labels if there is an account."""
    reports = Reports()
    async with aiohttp.ClientSession() as session:
        pods = KubernetesPods("app=agent", account, session, port=port) if account else None
        yield Discovery(names, pods, session=session, tls=None, found=reports, clock=clock or Clock()), reports


async def test_engines_behind_a_name_are_reported_once_and_leave_after_the_expiry() -> None:
    clock, pages = Clock(), {"/node": NODE}
    async with serve_pages(pages) as address:
        port = address.rpartition(":")[2]
        async with discover(f"localhost:{port}", clock=clock) as (discovery, reports):
            await discovery.look()
            await discovery.look()
            assert reports.latest_names == ["west-1/0"] and len(reports.all) == 1
            assert reports.all[0][0].wire == "10.0.0.5:7400" and reports.all[0][0].role == "decode"
            del pages["/node"]
            clock.now = EXPIRY_SECONDS - 1
            await discovery.look()
            assert len(reports.all) == 1, "one failed request is no departure"
            clock.now = EXPIRY_SECONDS + 1
            await discovery.look()
            assert reports.all[-1] == []


async def test_unresolvable_names_and_invalid_pages_are_ignored() -> None:
    for page in (b"not JSON", b'{"name": 1}', json.dumps({**NODE, "cluster_kind": "other"}).encode()):
        async with (
            serve_pages({"/node": page}) as address,
            discover("no-such-name.invalid:7401", address) as (discovery, reports),
        ):
            await discovery.look()
            assert reports.all == []


async def test_page_of_a_real_agent_describes_its_engines(tmp_path: Path) -> None:
    engine = {"instance": "e/0", "url": "http://127.0.0.1:1", "role": "both", "model": "m"}
    with Children(tmp_path) as children:
        stack = Stack(children, tmp_path)
        agent = stack.start_agent("east", cluster="far", cluster_kind="prfaas", engines=[engine])
        stack.await_agent(agent)
        async with discover(agent.status_url.removeprefix("http://")) as (discovery, reports):
            await discovery.look()
        (found,) = reports.all[0]
        described = (found.name, found.role, found.agent, found.cluster, found.cluster_kind, found.wire)
        assert described == ("e/0", "both", "east", "far", "prfaas", agent.wire)


def _write_account(directory: Path) -> Path:
    (directory / "token").write_text(f"{TOKEN}\n")
    (directory / "namespace").write_text("models")
    return directory


def _pod(address: str, phase: str = "Running") -> dict[str, Any]:
    """Return a pod of the API server's list, with fields that the router does not read."""
    return {"metadata": {"name": "x", "labels": {"app": "agent"}}, "status": {"phase": phase, "podIP": address}}


async def test_running_pods_with_the_labels_are_asked(tmp_path: Path) -> None:
    agents = {"/node": NODE}
    clock = Clock()
    async with serve_pages(agents) as agent:
        host, _, port = agent.rpartition(":")
        failed = [_pod("127.9.9.9", "Failed")] * 20_000  # A list that comes in many chunks.
        pods = {"kind": "PodList", "items": [*failed, _pod(host), _pod("", "Pending")]}
        path = "/api/v1/namespaces/models/pods?labelSelector=app%3Dagent"
        async with serve_pages({path: pods}, token=TOKEN) as api:
            account = ServiceAccount(f"http://{api}", "models", _write_account(tmp_path) / "token", None)
            async with discover(account=account, port=int(port), clock=clock) as (discovery, reports):
                await discovery.look()
                assert reports.latest_names == ["west-1/0"]
                (tmp_path / "token").write_text("another")
                clock.now = EXPIRY_SECONDS + 1
                await discovery.look()  # The API server refuses, so the agents that it named last are asked.
                assert len(reports.all) == 1
                del agents["/node"]
                clock.now = 2 * EXPIRY_SECONDS + 2
                await discovery.look()
                assert reports.latest_names == []


def test_selector_needs_a_pod_with_a_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_discovery, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=r"discovery.kubernetes_selector: .*pod"):
        ServiceAccount.read()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ConfigError, match=r"discovery.kubernetes_selector: .*token cannot be used"):
        ServiceAccount.read()
    _write_account(tmp_path)
    with pytest.raises(ConfigError, match=r"discovery.kubernetes_selector: .*ca.crt cannot be used"):
        ServiceAccount.read()
