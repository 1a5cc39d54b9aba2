"""Servers of one manager process: health, pages, orderly and abrupt ends."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prfaas.errors import ConfigError
from prfaas.index.store.redis_store import RedisStore
from prfaas.manager.daemon import Manager
from prfaas.rpc.methods import SERVICE_NAME
from tests.support.deployment import SECRET, Deployment, chain_of, hybrid_layout, stored
from tests.support.waiting import PATIENCE_SECONDS, until
from tools.free_ports import free_address

LAYOUT = hybrid_layout()


async def test_health_is_served(deployment: Deployment) -> None:
    manager = await deployment.start_manager()
    async with grpc.aio.insecure_channel(manager.address) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_pages_show_readiness_metrics_and_state(deployment: Deployment) -> None:
    manager = await deployment.start_manager()
    await deployment.node("n1", manager, holds=stored(LAYOUT, chain_of(320), 320))
    async with aiohttp.ClientSession(f"http://{manager.http_address}") as session:
        pages = {}
        for path in ("/healthz", "/readyz", "/metrics", "/state"):
            async with session.get(path) as response:
                assert response.status == 200, path
                pages[path] = await response.text()
    assert 'prfaas_manager_nodes{cluster="east"} 1.0' in pages["/metrics"]
    assert "prfaas_manager_index_blocks 21.0" in pages["/metrics"]
    assert '"n1-engine"' in pages["/state"]


def command(deployment: Deployment, *flags: str) -> list[str]:
    secret = ["--secret-file", str(deployment.secret_file), "--http-listen", "127.0.0.1:0"]
    return [sys.executable, "-m", "prfaas.cli.manager", *secret, *flags]


async def test_sigterm_releases_the_lease(deployment: Deployment) -> None:
    redis = await deployment.start_redis()
    address = free_address()
    flags = ["--listen", address, "--redis-url", redis.url]
    process = await asyncio.create_subprocess_exec(*command(deployment, *flags), stderr=subprocess.DEVNULL)
    await deployment.node("n1", addresses=(address,), holds=stored(LAYOUT, chain_of(640), 320))
    store = RedisStore(redis.url)
    (east,) = await store.clusters()
    assert await store.writer(east) == address
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), PATIENCE_SECONDS) == 0
    assert await store.writer(east) is None
    await store.close()
    late = await deployment.start_manager()
    deployment.run(moved := deployment.reporter("n2", late))
    await until(lambda: moved.status.manager == late.address)
    await until(lambda: late.world.index.num_blocks() == 21, what="what the first manager recorded")


async def test_embedded_redis_dies_with_its_manager(deployment: Deployment) -> None:
    address = free_address()
    process = await asyncio.create_subprocess_exec(
        *command(deployment, "--listen", address),
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(deployment.directory)},
    )
    await until(lambda: servers_of(process.pid), what="the embedded Redis")
    (redis,) = servers_of(process.pid)
    process.kill()
    await process.wait()
    await until(lambda: state(redis) == "" or ") Z " in state(redis), what="its end")


def servers_of(pid: int) -> list[int]:
    """Return the children of a process that are redis-server."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    children = [int(word) for word in listed.read_text().split()] if listed.exists() else []
    return [child for child in children if "redis-server" in state(child)]


def state(pid: int) -> str:
    """The beginning of /proc/<pid>/stat, "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text()[:80]
    except (FileNotFoundError, ProcessLookupError):
        return ""


async def test_listening_beyond_loopback_needs_tls_or_consent(deployment: Deployment) -> None:
    await deployment.start_redis()
    with pytest.raises(ValueError, match="insecure_plaintext"):
        deployment.config(listen="0.0.0.0:0")
    told = Manager(deployment.config(listen="0.0.0.0:0", insecure_plaintext=True), SECRET)
    await told.start()
    await told.close()


async def test_redis_that_may_evict_keys_is_refused(deployment: Deployment) -> None:
    redis = await deployment.start_redis()
    store = RedisStore(redis.url)
    await store._client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match="noeviction"):
        await store.check()
    await store.close()


def test_manager_imports_neither_torch_nor_vllm() -> None:
    code = "import prfaas.cli.manager, prfaas.rpc.reporter, prfaas.rpc.client, sys; print({'torch', 'vllm'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert found.stdout == "set()\n"


async def test_taken_address_is_named(deployment: Deployment) -> None:
    await deployment.start_redis()
    first = await deployment.start_manager()
    for taken in ({"listen": first.address}, {"http_listen": first.http_address}):
        second = Manager(deployment.config(**taken), SECRET)
        with pytest.raises(ConfigError, match=f"listen.*{first.address}" if "listen" in taken else "http_listen"):
            await second.start()
        await second.close()


async def test_stopping_manager_expires_no_nodes(deployment: Deployment) -> None:
    manager = await deployment.start_manager(expiry_seconds=2.0, stop_seconds=5.0)
    await deployment.node("n1", manager)
    told: list[int] = []

    async def watch() -> None:
        async for state in deployment.client(manager).watch_state():
            num_nodes = len(state.nodes)
            told.append(num_nodes)

    watching = asyncio.create_task(watch())
    await until(lambda: told and told[-1] == 1, what="the node")
    before = len(told)
    await deployment.stop_manager(manager)
    await deployment.end(watching)
    assert len(told) - before > 2 and set(told[before:]) == {1}


async def test_a_connection_without_a_whole_request_is_closed(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prfaas.manager.api.http._FIRST_REQUEST_SECONDS", 0.5)
    manager = await deployment.start_manager()
    host, _, port = manager.http_address.rpartition(":")
    sent = (b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
    opened = [await asyncio.open_connection(host, int(port)) for _ in sent]
    for (_, writer), start in zip(opened, sent, strict=True):
        writer.write(start)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    async with asyncio.timeout(PATIENCE_SECONDS):
        for unused, _ in opened:
            with contextlib.suppress(ConnectionResetError):
                assert await unused.read() == b""
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"ok\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200"), "a connection that was used stays"
    for _, each in (*opened, (reader, writer)):
        each.close()
