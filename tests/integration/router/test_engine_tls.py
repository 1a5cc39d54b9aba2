"""Engines at https URLs, with certificates of the deployment on both sides."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from prfaas.console.authority import Authority, IssuedCertificate
from prfaas.errors import ConfigError
from prfaas.router.config import ClusterConfig, InstanceConfig
from prfaas.router.openai.headers import PREFILL_HEADER
from prfaas.router.server import open_router
from prfaas.router.sidecar.config import SidecarConfig
from prfaas.router.sidecar.server import open_sidecar
from prfaas.transport.net.tls import CertificateFiles, Certificates
from tests.support.certificates import tls_config
from tests.support.paced_engine import MODEL, PacedEngine, running
from tests.support.router import SECRET, RunningRouter, router_config
from tests.support.waiting import PATIENCE_SECONDS


def _certificates(issued: IssuedCertificate) -> Certificates:
    return Certificates(CertificateFiles(issued.authority, issued.certificate, issued.key))


@contextlib.asynccontextmanager
async def _router(engine: PacedEngine, issued: IssuedCertificate, *, engine_tls: str) -> AsyncIterator[RunningRouter]:
    instance = InstanceConfig(name="west/0", url=engine.url, role="both", agent="w", wire="127.0.0.1:7400")
    config = router_config(
        clusters=(ClusterConfig(name="west", kind="pd", instances=(instance,)),),
        engine_tls=engine_tls,
        tls=tls_config(issued),
    )
    async with aiohttp.ClientSession() as session, open_router(config, SECRET) as address:
        yield RunningRouter(f"http://{address}", [], [engine], session)


@pytest.fixture
async def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
async def engine(authority: Authority) -> AsyncIterator[PacedEngine]:
    engine = PacedEngine(tls=_certificates(authority.issue("engine")).server_context())
    async with running(engine):
        yield engine


async def test_engine_and_router_authenticate_with_the_deployments_certificates(
    engine: PacedEngine, authority: Authority
) -> None:
    async with _router(engine, authority.issue("router"), engine_tls="deployment") as router:
        await router.until_health(west_0=True)
        status, _, _ = await router.post({"prompt": "x"})
    assert status == 200


async def test_sidecar_hands_over_between_engines_with_mutual_tls(engine: PacedEngine, authority: Authority) -> None:
    engine.keeps = {"remote_engine_id": "e"}
    issued = authority.issue("sidecar")
    config = SidecarConfig(listen="127.0.0.1:0", engine_url=engine.url, engine_tls="deployment", tls=tls_config(issued))
    asked = {PREFILL_HEADER: engine.url.removeprefix("https://")}
    async with open_sidecar(config) as address, aiohttp.ClientSession() as session:
        body = {"model": MODEL, "prompt": "x"}
        async with session.post(f"http://{address}/v1/completions", json=body, headers=asked) as response:
            assert response.status == 200
    assert ["max_tokens" in body for body in engine.bodies] == [True, False], "a prefill leg, then a decode leg"


@pytest.mark.parametrize("engine_tls", ["system", "deployment"])
async def test_engine_of_an_unknown_authority_gets_no_request(
    engine: PacedEngine, authority: Authority, tmp_path: Path, engine_tls: str
) -> None:
    """The system's authorities do not know ours, and another deployment's does not either."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    issued = (Authority(elsewhere) if engine_tls == "deployment" else authority).issue("router")
    tries: list[object] = []
    assert engine.tls is not None
    engine.tls.sni_callback = lambda *arguments: tries.append(arguments)
    async with _router(engine, issued, engine_tls=engine_tls) as router:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(tries) < 3:  # noqa: ASYNC110 - a callback of OpenSSL
                await asyncio.sleep(0.01)
        status, _, _ = await router.post({"prompt": "x"})
    assert status == 503
    assert not engine.num_probes and not engine.bodies


def test_engine_tls_deployment_needs_certificates() -> None:
    with pytest.raises((ConfigError, ValueError), match="engine_tls: deployment needs tls"):
        router_config(engine_tls="deployment")
