"""Real Envoy with the endpoint picker and the sidecar."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prfaas.router.ext_proc import server
from tests.integration.router.gateway import Gateway, make_gateway
from tests.integration.router.openai_client import assert_serves_an_openai_client
from tests.support.paced_engine import MODEL
from tests.support.router import LONG, SHORT
from tests.support.waiting import PATIENCE_SECONDS, until


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with make_gateway(tmp_path) as made:
        yield made


async def test_unchanged_openai_client_is_served_through_envoy(gateway: Gateway) -> None:
    await assert_serves_an_openai_client(gateway.url)
    assert len(gateway.east.bodies) == 5  # Both long completions and all three long chats, but not the image.


async def test_body_of_many_chunks_arrives_whole(gateway: Gateway) -> None:
    text = "z" * 900_000
    assert (await gateway.post({"prompt": text}))[0] == 200
    assert gateway.east.bodies[0]["prompt"] == list(text.encode())[:-1]


async def test_body_that_ends_with_trailers_is_routed(gateway: Gateway) -> None:
    body = json.dumps({"model": MODEL, "prompt": SHORT})
    head = "POST /v1/completions HTTP/1.1\r\nHost: front\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
    with contextlib.closing(writer):
        writer.write(f"{head}{len(body):x}\r\n{body}\r\n0\r\nx-checksum: 1\r\n\r\n".encode())
        async with asyncio.timeout(PATIENCE_SECONDS):
            answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert [body["prompt"] for body in gateway.west.bodies] == [SHORT]


async def test_client_cannot_name_the_engines(gateway: Gateway) -> None:
    forged = {"x-prefiller-host-port": "127.0.0.1:1", "x-prfaas-grant": "forged"}
    forged["x-gateway-destination-endpoint"] = "127.0.0.1:1"
    assert (await gateway.post({"prompt": SHORT}, **forged))[0] == 200
    assert "kv_transfer_params" not in gateway.west.bodies[0]
    assert gateway.east.bodies == []


async def test_disconnected_client_ends_its_legs_and_frees_its_place(tmp_path: Path) -> None:
    async with make_gateway(tmp_path, max_requests=1) as gateway:
        gateway.west.hangs = gateway.east.hangs = True
        first = asyncio.create_task(gateway.post({"prompt": LONG}))
        await until(lambda: gateway.west.bodies and gateway.east.bodies)
        status, body, headers = await gateway.post({"prompt": SHORT})
        assert (status, headers["Retry-After"]) == (429, "1") and b"rate_limit_error" in body
        first.cancel()
        await until(lambda: gateway.west.num_broken_off + gateway.east.num_broken_off == 2)
        gateway.west.hangs = False
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await gateway.post({"prompt": SHORT}))[0] != 200:  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0.02)


async def test_body_above_the_limit_is_refused(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 10_000)
    status, body, _ = await gateway.post({"prompt": "z" * 20_000})
    assert (status, json.loads(body)["error"]["code"]) == (413, 413)
    assert (await gateway.post({"prompt": SHORT, "model": MODEL}))[0] == 200
