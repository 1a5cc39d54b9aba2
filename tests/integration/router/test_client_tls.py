"""TLS at the clients' port: certificates, client certificates and renewal."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from prometheus_client import REGISTRY

from prfaas.console.authority import Authority, IssuedCertificate
from prfaas.router.config import ClusterConfig, InstanceConfig, LimitsConfig, RouterConfig
from prfaas.router.server import open_router
from prfaas.transport.net.tls import CertificateFiles, Certificates, TlsConfig
from tests.integration.console.terminal import run_here
from tests.support.paced_engine import PacedEngine, running
from tests.support.router import SECRET, STREAMED, RunningRouter, operators_beside, router_config
from tests.support.waiting import PATIENCE_SECONDS, until


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
async def engine() -> AsyncIterator[PacedEngine]:
    engine = PacedEngine()
    async with running(engine):
        yield engine


def _files(issued: IssuedCertificate, *names: str) -> dict[str, TlsConfig]:
    return {"client_tls": TlsConfig(**{name: getattr(issued, name) for name in names})}


def _client(authority: Authority, issued: IssuedCertificate | None = None) -> ssl.SSLContext:
    """Return the context of a client that knows the authority, and shows `issued` if given."""
    context = ssl.create_default_context(cafile=str(authority.path))
    if issued is not None:
        context.load_cert_chain(issued.certificate, issued.key)
    return context


def _config(engine: PacedEngine, **settings: Any) -> RouterConfig:
    instance = InstanceConfig(name="west/0", url=engine.url, role="both", agent="w", wire="127.0.0.1:7400")
    return router_config(clusters=(ClusterConfig(name="west", kind="pd", instances=(instance,)),), **settings)


@contextlib.asynccontextmanager
async def _router(engine: PacedEngine, tls: ssl.SSLContext, **settings: Any) -> AsyncIterator[RunningRouter]:
    async with open_router(_config(engine, **settings), SECRET) as address:
        connector = aiohttp.TCPConnector(ssl=tls, force_close=True)  # Each request needs a handshake.
        async with aiohttp.ClientSession(connector=connector) as session:
            yield RunningRouter(f"https://{address}", [], [engine], session)


def _refusals(reason: str) -> float:
    return REGISTRY.get_sample_value("prfaas_router_client_tls_refusals_total", {"reason": reason}) or 0.0


def _is_refused(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return True
    return False


async def test_stopping_router_refuses_connections_and_completes_its_requests(
    engine: PacedEngine, authority: Authority
) -> None:
    shown, engine.hangs = _files(authority.issue("router"), "certificate", "key"), True
    connector = aiohttp.TCPConnector(ssl=_client(authority))
    async with aiohttp.ClientSession(connector=connector) as session, contextlib.AsyncExitStack() as stack:
        address = await stack.enter_async_context(open_router(_config(engine, **shown), SECRET))
        router = RunningRouter(f"https://{address}", [], [engine], session)
        await router.until_health(west_0=True)
        asked = asyncio.create_task(router.post({"prompt": "x"}))
        await until(lambda: engine.bodies, what="a request under way")
        ending = asyncio.create_task(stack.aclose())
        await until(lambda: _is_refused(address), what="a port given up")
        assert not ending.done() and not asked.done()
        asked.cancel()
        await until(lambda: engine.num_broken_off == 1, what="the end of the engine's request")
        await ending


async def test_clients_need_no_certificate_by_default(engine: PacedEngine, authority: Authority) -> None:
    shown = _files(authority.issue("router"), "certificate", "key")
    async with _router(engine, _client(authority), **shown) as router:
        await router.until_health(west_0=True)
        status, body, _ = await router.post({"prompt": "x", "stream": True})
        assert (status, body) == (200, STREAMED)
        before = _refusals("tls_none")
        with pytest.raises(aiohttp.ClientError):
            await router.session.get(router.url.replace("https", "http") + "/health")
        await until(lambda: _refusals("tls_none") > before, what="the count of a plain client")


async def test_clients_need_a_certificate_if_configured(
    engine: PacedEngine, authority: Authority, tmp_path: Path
) -> None:
    issued = authority.issue("router")
    valid, revoked = authority.issue("app"), authority.issue("traitor")
    authority.revoke(revoked.serial)
    shown = _files(issued, "certificate", "key", "authority", "revocations")
    operator, of_operators = operators_beside(tmp_path / "clients")
    async with _router(engine, _client(authority, valid), listen="0.0.0.0:0", **shown, **of_operators) as router:
        here = RunningRouter(
            router.url.replace("0.0.0.0", "127.0.0.1"), [], [engine], router.session, operator=operator
        )
        await here.until_health(west_0=True)
        assert [await here.status("/metrics", headers) for headers in ({}, operator)] == [401, 200]
        for certificate, reason in ((None, "tls_untrusted"), (revoked, "tls_revoked")):
            before = _refusals(reason)
            with pytest.raises(aiohttp.ClientError):
                await here.session.get(f"{here.url}/health", ssl=_client(authority, certificate))
            await until(lambda reason=reason, before=before: _refusals(reason) > before, what=reason)  # type: ignore[misc]


async def test_renewed_certificate_is_used_without_a_restart(engine: PacedEngine, authority: Authority) -> None:
    first = authority.issue("router")
    async with _router(engine, _client(authority), **_files(first, "certificate", "key")) as router:
        address = router.url.removeprefix("https://")
        assert await asyncio.to_thread(_serial, address, authority) == first.serial
        second = authority.issue("router")  # The files keep their names.
        assert await asyncio.to_thread(_serial, address, authority) == second.serial != first.serial


def _serial(address: str, authority: Authority) -> int:
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as plain,
        _client(authority).wrap_socket(plain, server_hostname=host) as tls,
    ):
        return int(str((tls.getpeercert() or {})["serialNumber"]), 16)


async def test_disconnected_client_ends_its_request(engine: PacedEngine, authority: Authority) -> None:
    engine.hangs = True
    shown = _files(authority.issue("router"), "certificate", "key")
    async with _router(engine, _client(authority), **shown) as router:
        await router.until_health(west_0=True)
        asking = asyncio.create_task(router.post({"prompt": "x", "stream": True}))
        await until(lambda: len(engine.bodies) == 1, what="the engine's request")
        asking.cancel()
        await until(lambda: engine.num_broken_off == 1, what="the end of the engine's request")


@pytest.mark.parametrize("names", [("certificate", "key", "authority")])
async def test_doctor_recognises_a_running_router(
    engine: PacedEngine, authority: Authority, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Also where it asks for a certificate that the doctor has not got."""
    issued = authority.issue("router")
    async with _router(engine, _client(authority), **_files(issued, *names)) as router:
        secret, path = tmp_path / "secret", tmp_path / "router.yaml"
        secret.touch(mode=0o600)
        secret.write_bytes(SECRET)
        settings = {
            "listen": router.url.removeprefix("https://"),
            "secret_file": str(secret),
            "managers": ["a:1"],
            "client_tls": {name: str(getattr(issued, name)) for name in names},
        }
        path.write_text(yaml.safe_dump(settings))
        ran = await asyncio.to_thread(run_here, "doctor", f"--router={path}", "--pages=")
    (port,) = [finding["message"] for finding in ran.document if finding["subject"] == "port"]
    assert "in use by this component" in port


def test_listening_beyond_loopback_needs_client_certificates_or_keys(authority: Authority) -> None:
    issued = authority.issue("router")
    router_config(listen="0.0.0.0:0", **_files(issued, "certificate", "key", "authority"))
    with pytest.raises(ValueError, match="api_keys_file: missing"):
        router_config(listen="0.0.0.0:0", **_files(issued, "certificate", "key"))
    with pytest.raises(ValueError, match="key: missing"):
        router_config(**_files(issued, "certificate"))


def test_client_context_without_an_authority_trusts_nobody(authority: Authority) -> None:
    issued = authority.issue("router")
    contexts = Certificates(CertificateFiles(None, issued.certificate, issued.key))
    assert contexts.client_context().verify_mode is ssl.CERT_REQUIRED and not contexts.client_context().get_ca_certs()
    assert contexts.server_context().verify_mode is ssl.CERT_NONE


async def test_addresses_have_their_own_budget_of_encrypted_connections(
    engine: PacedEngine, authority: Authority
) -> None:
    """The router counts the peers of its TLS proxy, not the proxy's own connections on loopback."""
    shown = _files(authority.issue("router"), "certificate", "key")
    context = _client(authority)
    async with (
        _router(engine, context, limits=LimitsConfig(connections=4), **shown) as router,
        contextlib.AsyncExitStack() as stack,
    ):
        await router.until_health(west_0=True)
        host, port = router.url.removeprefix("https://").split(":")

        async def connect() -> bool:
            """Return whether one more connection from 127.0.0.2 is accepted."""
            try:
                _, writer = await asyncio.open_connection(
                    host, int(port), ssl=context, server_hostname=host, local_addr=("127.0.0.2", 0)
                )
            except OSError:
                return False
            stack.callback(writer.close)
            return True

        before = _client_refusals("connections_of_client")
        assert [await connect() for _ in range(4)] == [True, True, True, False]
        assert _client_refusals("connections_of_client") - before == 1
        assert (await router.post({"prompt": "x"}))[0] == 200


def _client_refusals(reason: str) -> float:
    return REGISTRY.get_sample_value("prfaas_router_client_refusals_total", {"reason": reason}) or 0.0
