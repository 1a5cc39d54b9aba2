"""Mutual TLS: callers need a certificate of the authority with their own name."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prfaas.agent.config import AgentConfig, EngineConfig
from prfaas.agent.report import NodeReporter
from prfaas.console.authority import Authority
from prfaas.errors import IndexRefusal, ManagerUnreachable
from prfaas.index.membership import Node
from prfaas.router.config import RouterConfig
from prfaas.router.server import open_router
from prfaas.rpc.channel import Channel
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.reporter import Reporter
from prfaas.transport.net.tls import CertificateFiles, TlsConfig
from prfaas.types import AgentName, ClusterName
from tests.support.certificates import tls_config
from tests.support.deployment import SECRET, Deployment
from tests.support.waiting import PATIENCE_SECONDS, until


def _tls(authority: Authority, name: str) -> CertificateFiles:
    issued = authority.issue(name)
    return CertificateFiles(issued.authority, issued.certificate, issued.key)


async def test_certificate_must_have_the_callers_name(deployment: Deployment, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    served, trusted = _tls(authority, "manager"), _tls(authority, "n1")
    manager = await deployment.start_manager(tls=tls_config(served))
    request = pb.MatchRequest(model="unheard-of")
    honest = Channel(manager.address, name="n1", secret=SECRET, tls=trusted)
    with pytest.raises(IndexRefusal, match="unheard-of"):
        await honest.call("Match", request, timeout_seconds=PATIENCE_SECONDS)
    liar = Channel(manager.address, name="n2", secret=SECRET, tls=trusted)
    with pytest.raises(IndexRefusal) as refusal:
        await liar.call("Match", request, timeout_seconds=PATIENCE_SECONDS)
    assert refusal.value.reason == "unauthenticated"
    plain = Channel(manager.address, name="n1", secret=SECRET)
    with pytest.raises(ManagerUnreachable):
        await plain.call("Match", request, timeout_seconds=5)
    for channel in (honest, liar, plain):
        await channel.close()


async def test_changed_certificates_are_used_on_both_sides(deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    before, after = Authority(tmp_path), Authority(tmp_path / "new")
    served, trusted = before.issue("manager"), before.issue("n1")
    manager = await deployment.start_manager(tls=tls_config(served))
    channel = Channel(
        manager.address,
        name="n1",
        secret=SECRET,
        tls=CertificateFiles(trusted.authority, trusted.certificate, trusted.key),
    )
    request = pb.MatchRequest(model="unheard-of")
    with pytest.raises(IndexRefusal, match="unheard-of"):
        await channel.call("Match", request, timeout_seconds=PATIENCE_SECONDS)
    for old, new in ((served, after.issue("manager")), (trusted, after.issue("n1"))):
        old.key.write_bytes(new.key.read_bytes())
        old.certificate.write_bytes(new.certificate.read_bytes())
    stranger = _tls(before, "n2")
    served.authority.write_bytes(after.path.read_bytes())
    with pytest.raises(IndexRefusal, match="unheard-of"):
        await channel.call("Match", request, timeout_seconds=PATIENCE_SECONDS)
    former = Channel(manager.address, name="n2", secret=SECRET, tls=replace(stranger, authority=after.path))
    with pytest.raises(ManagerUnreachable):
        await former.call("Match", request, timeout_seconds=1)
    for opened in (channel, former):
        await opened.close()


async def test_agents_and_routers_use_their_certificates(deployment: Deployment, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    served, node, door = (_tls(authority, name) for name in ("manager", "n1", "router"))
    manager = await deployment.start_manager(tls=tls_config(served))
    agent = AgentConfig(
        name="n1",
        secret_file=deployment.secret_file,
        managers=(manager.address,),
        cluster="west",
        engines=(EngineConfig(instance="n1/0", url="http://127.0.0.1:9", role="both", model="tiny"),),
        tls=tls_config(node),
    )
    reporting = NodeReporter(
        agent, SECRET, epoch=1, wire_address="127.0.0.1:7400", link_stats=list, on_command=_no_copy
    )
    running = deployment.run(reporting.reporter)
    await until(lambda: reporting.reporter.status.manager == manager.address, what="the agent at the manager")
    config = RouterConfig(listen="127.0.0.1:0", secret_file="-", managers=(manager.address,), tls=tls_config(door))
    async with open_router(config, SECRET) as address, aiohttp.ClientSession() as session:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while "n1/0" not in await _instances(session, address):  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0.02)
    await deployment.end(running)


def _no_copy(command: object) -> None:
    raise AssertionError(f"nobody commands {command}")


async def _instances(session: aiohttp.ClientSession, address: str) -> dict[str, bool]:
    async with session.get(f"http://{address}/health") as response:
        states: dict[str, bool] = (await response.json())["instances"]
        return states


@pytest.mark.parametrize("given", [{"key": Path("k")}, {"certificate": Path("c"), "key": Path("k")}])
def test_incomplete_certificate_settings_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="go together"):
        AgentConfig(name="n1", secret_file=Path("s"), tls=TlsConfig(**given))


async def test_connections_with_old_certificates_end_with_their_last_call(
    deployment: Deployment, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    served, trusted = authority.issue("manager"), _tls(authority, "n1")
    manager = await deployment.start_manager(tls=tls_config(served))
    channel = Channel(manager.address, name="n1", secret=SECRET, tls=trusted)
    watching = channel.stream("WatchState", pb.WatchStateRequest())
    await anext(aiter(watching))
    for _ in range(3):
        authority.issue("n1")
        with pytest.raises(IndexRefusal, match="unheard-of"):
            await channel.call("Match", pb.MatchRequest(model="unheard-of"), timeout_seconds=PATIENCE_SECONDS)
    await until(lambda: _num_connections(manager.address) == 2, what="the watch's connection and the present one")
    watching.cancel()
    await until(lambda: not channel._retired, what="the former's end with the watch")
    await channel.close()


def _num_connections(address: str) -> int:
    """Established connections to a port of this machine, by the kernel's tables."""
    port = int(address.rpartition(":")[2])
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    return sum(int(fields[2].rpartition(":")[2], 16) == port and fields[3] == "01" for fields in lines)


async def test_missing_certificate_file_makes_the_manager_unreachable(
    deployment: Deployment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    served, trusted = _tls(authority, "manager"), _tls(authority, "n1")
    manager = await deployment.start_manager(tls=tls_config(served))
    aside = trusted.certificate.rename(tmp_path / "aside")
    node = Node(AgentName("n1"), ClusterName("east"), "pd", "n1:7400", 1, ())
    reporter = Reporter([manager.address], node=node, secret=SECRET, tls=trusted)
    running = deployment.run(reporter)
    await until(lambda: running.done() or "manager.lost" in caplog.text, what="the missing file's being noticed")
    aside.rename(trusted.certificate)
    await until(lambda: reporter.status.manager == manager.address, what="the agent at the manager")
    await deployment.end(running)
