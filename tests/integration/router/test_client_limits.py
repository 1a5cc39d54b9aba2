"""Limits of single clients: connections, late headers and bodies, bytes in memory and requests."""

import asyncio
import contextlib
import gc
import io
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import REGISTRY

from prfaas.router.config import LimitsConfig
from prfaas.router.http.budget import RESERVE_RATIO
from prfaas.router.http.limits import RESERVED_DESCRIPTORS, network_of
from prfaas.router.openai.request import ParsedRequest
from prfaas.router.server import PLAIN_DESCRIPTORS
from tests.support.paced_engine import MODEL
from tests.support.router import SHORT, RunningRouter, running_router
from tests.support.router_process import RouterProcess, running_processes
from tests.support.secret_files import write_secret
from tests.support.waiting import until

HALF_HEADERS = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\n"
HALF_BODY = HALF_HEADERS + b'Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"prompt":'
REFUSAL = re.compile(r'prfaas_router_client_refusals_total\{reason="(\w+)"\} (\S+)')


@contextlib.contextmanager
def _connections(router: RouterProcess, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """Open connections from 127.0.0.2 that send the same bytes and then nothing more."""
    host, port = router.url.removeprefix("http://").split(":")
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            connection = socket.create_connection((host, int(port)), timeout=10, source_address=("127.0.0.2", 0))
            opened.append(connection)
            with contextlib.suppress(OSError):  # The router may have refused it already.
                connection.sendall(sent)
        yield opened
    finally:
        for connection in opened:
            connection.close()


async def _refusals(session: aiohttp.ClientSession, router: RouterProcess) -> dict[str, float]:
    async with session.get(f"{router.url}/metrics") as response:
        return {reason: float(count) for reason, count in REFUSAL.findall(await response.text())}


@pytest.mark.parametrize("sent", [b"", HALF_HEADERS, HALF_BODY], ids=["idle", "half headers", "half bodies"])
@pytest.mark.parametrize("count", [600, pytest.param(5000, marks=pytest.mark.soak)])
async def test_other_clients_are_served_beside_thousands_of_slow_connections(
    tmp_path: Path, sent: bytes, count: int
) -> None:
    limits = {"header_time": "120s", "body_time": "120s"}
    with running_processes(tmp_path, max_descriptors=1024, limits=limits) as router, _connections(router, count, sent):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            for _ in range(20):
                body = {"model": MODEL, "prompt": SHORT}
                async with session.post(f"{router.url}/v1/completions", json=body) as response:
                    assert response.status == 200
            most = (1024 - RESERVED_DESCRIPTORS) // PLAIN_DESCRIPTORS
            per_address = most - int(most * RESERVE_RATIO)
            assert (await _refusals(session, router))["connections_of_client"] == count - per_address


@pytest.mark.parametrize(
    ("sent", "reason"), [(b"", "slow_headers"), (HALF_HEADERS, "slow_headers"), (HALF_BODY, "slow_body")]
)
async def test_late_headers_and_bodies_end_their_connections(tmp_path: Path, sent: bytes, reason: str) -> None:
    limits = {"header_time": "500ms", "body_time": "500ms"}
    with running_processes(tmp_path, limits=limits) as router, _connections(router, 3, sent) as opened:
        async with aiohttp.ClientSession() as session:
            counted: dict[str, float] = {}
            async with asyncio.timeout(20):
                while counted.get(reason) != 3:
                    await asyncio.sleep(0.05)
                    counted = await _refusals(session, router)
        for connection in opened:
            answer = connection.recv(4096)
            assert answer == b"" if reason == "slow_headers" else answer.startswith(b"HTTP/1.1 408 ")


async def test_key_cannot_take_all_requests(tmp_path: Path) -> None:
    keys = write_secret(tmp_path / "keys", "a first\nb second\n")
    async with running_router(api_keys_file=keys, max_requests=4) as router:
        router.west.hangs = True
        asking = [asyncio.create_task(router.post({"prompt": SHORT}, Authorization="Bearer a")) for _ in range(4)]
        done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result()[0] for task in done] == [429]
        await until(lambda: len(router.west.bodies) == 3)
        router.west.hangs = False
        assert (await router.post({"prompt": SHORT}, Authorization="Bearer b"))[0] == 200
        for task in asking:
            task.cancel()


LARGE = json.dumps({"model": MODEL, "prompt": "x", "stream": True, "metadata": "y" * (30 << 20)}).encode()


def _post(router: RunningRouter, raw: bytes, *, path: str = "completions", **headers: str) -> Any:
    return router.session.post(f"{router.url}/v1/{path}", data=io.BytesIO(raw), headers=headers)


async def test_bodies_beyond_the_memory_limit_are_refused() -> None:
    async with running_router(limits=LimitsConfig(body_bytes=40 << 20)) as router:
        router.west.hangs = True
        first = asyncio.create_task(_post(router, LARGE).__aenter__())
        await until(lambda: router.west.bodies)
        async with _post(router, LARGE) as response:
            assert response.status == 429
        router.west.hangs = False
        assert (await router.post({"prompt": SHORT}))[0] == 200
        first.cancel()


@pytest.mark.parametrize("path", ["completions", "responses"])
async def test_body_counts_only_until_the_answer_begins(path: str) -> None:
    async with running_router(limits=LimitsConfig(body_bytes=40 << 20)) as router:
        router.west.token_seconds = 3600.0
        async with _post(router, LARGE, path=path) as first:
            await first.content.readany()
            assert not any(type(held) is ParsedRequest for held in gc.get_objects())
            async with _post(router, LARGE, path=path) as second:
                assert (first.status, second.status) == (200, 200)
                first.close()
                second.close()


@pytest.mark.parametrize("rest", [b"[", b" " * 990], ids=["late", "whole"])
async def test_refused_request_is_answered_and_its_connection_closed(tmp_path: Path, rest: bytes) -> None:
    keys = write_secret(tmp_path / "keys", "a first\n")
    async with running_router(api_keys_file=keys, limits=LimitsConfig(header_time=1.0)) as router:
        reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
        before = _counted("slow_headers")
        with contextlib.closing(writer):
            writer.write(HALF_BODY)
            assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
            writer.write(rest)  # It is part of the body, not the start of another request.
            started = time.monotonic()
            await reader.read()
            assert time.monotonic() - started < 5.0, "aiohttp's own delay is 10 s"
        assert _counted("slow_headers") == before


def _counted(reason: str) -> float:
    return REGISTRY.get_sample_value("prfaas_router_client_refusals_total", {"reason": reason}) or 0.0


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8::1:2", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_ipv6_clients_count_by_their_network(host: str, client: str) -> None:
    assert network_of(host) == client
