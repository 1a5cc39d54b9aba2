"""Loads of engines whose metrics pages need the deployment's certificates."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from prfaas.agent import report
from prfaas.agent.config import AgentConfig, EngineConfig
from prfaas.agent.report import EngineLoads
from prfaas.console.authority import Authority
from prfaas.index.membership import EngineLoad
from prfaas.transport.net.tls import CertificateFiles, Certificates
from prfaas.types import InstanceId
from tests.support.certificates import tls_config
from tests.support.waiting import until

PAGE = "vllm:num_requests_running 3.0\nvllm:num_requests_waiting 2.0\nvllm:kv_cache_usage_perc 0.5\n"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextlib.asynccontextmanager
async def _engine(authority: Authority, tries: list[object]) -> AsyncIterator[EngineConfig]:
    """Engine that requires a certificate of the authority; `tries` gets every connection attempt."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=PAGE)

    issued = authority.issue("engine")
    tls = Certificates(CertificateFiles(issued.authority, issued.certificate, issued.key)).server_context()
    tls.sni_callback = lambda *arguments: tries.append(arguments)
    app = web.Application()
    for path in ("/health", "/metrics"):
        app.router.add_get(path, answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield EngineConfig(instance="a", url=f"https://127.0.0.1:{runner.addresses[0][1]}", role="both", model="m")
    finally:
        await runner.cleanup()


def _config(authority: Authority, engine: EngineConfig, **settings: Any) -> AgentConfig:
    tls = tls_config(authority.issue("agent"))
    return AgentConfig(name="agent", secret_file=Path("secret"), engines=(engine,), tls=tls, **settings)


@contextlib.asynccontextmanager
async def _watched(config: AgentConfig) -> AsyncIterator[EngineLoads]:
    loads = EngineLoads(config.engines, config.engine_certificates())
    watching = asyncio.create_task(loads.watch_forever())
    try:
        yield loads
    finally:
        watching.cancel()


# `insecure_plaintext` covers the wire and the agent's pages, not engines.
@pytest.mark.parametrize("insecure_plaintext", [False, True])
async def test_engine_and_agent_authenticate_with_deployment_certificates(
    authority: Authority, insecure_plaintext: bool
) -> None:
    async with _engine(authority, []) as engine:
        config = _config(authority, engine, engine_tls="deployment", insecure_plaintext=insecure_plaintext)
        async with _watched(config) as loads:
            await until(lambda: loads.current() == (EngineLoad(InstanceId("a"), 3, 2, 0.5),), what="the engine's load")


@pytest.mark.parametrize("engine_tls", ["system", "deployment"])
async def test_engine_with_untrusted_certificate_has_no_load(
    authority: Authority, tmp_path: Path, engine_tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "LOAD_INTERVAL_SECONDS", 0.05)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    tries: list[object] = []
    async with _engine(authority, tries) as engine:
        trusted = Authority(elsewhere) if engine_tls == "deployment" else authority
        async with _watched(_config(trusted, engine, engine_tls=engine_tls)) as loads:
            await until(lambda: len(tries) >= 2, what="a second try")
            assert loads.current() == ()


def test_deployment_tls_needs_certificates() -> None:
    with pytest.raises(ValueError, match="engine_tls: deployment needs tls"):
        AgentConfig(name="agent", secret_file=Path("secret"), engine_tls="deployment")
