"""Real Envoy with the endpoint picker and the sidecar."""

from __future__ import annotations

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
from tests.support.router import LONG, SHORT, STREAMED
from tests.support.secret_files import write_secret
from tests.support.waiting import PATIENCE_SECONDS, until


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with make_gateway(tmp_path) as made:
        yield made


@pytest.mark.parametrize("body_mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
async def test_unchanged_openai_client_is_served_through_envoy(tmp_path: Path, body_mode: str) -> None:
    async with make_gateway(tmp_path, body_mode=body_mode) as gateway:
        await assert_serves_an_openai_client(gateway.url)
        assert len(gateway.east.bodies) == 5  # Both long completions and all three long chats, but not the image.


async def test_long_prompt_is_prefilled_by_the_picked_engine_under_its_grant(gateway: Gateway) -> None:
    status, body, headers = await gateway.post({"prompt": LONG, "stream": True}, **{"x-request-id": "r1"})
    assert (status, body, headers["x-request-id"]) == (200, STREAMED, "r1")
    assert (headers["x-prfaas-route"], headers["x-prfaas-reason"]) == ("remote", "long")
    sent, taken = gateway.east.bodies[0], gateway.west.bodies[0]
    assert sent["prompt"] == list(LONG.encode())[:-1]
    assert sent["kv_transfer_params"]["prfaas_grant"] == taken["kv_transfer_params"]["prfaas_grant"]
    async with gateway.session.get(f"{gateway.router_url}/debug/decision/r1") as explained:
        record = await explained.json()
    assert (record["route"], record["reason"], record["status"]) == ("remote", "long", 200)


async def test_short_prompt_is_prefilled_by_the_decode_engine(gateway: Gateway) -> None:
    assert (await gateway.post({"prompt": SHORT, "stream": True}))[:2] == (200, STREAMED)
    assert (len(gateway.east.bodies), len(gateway.west.bodies)) == (0, 1)


async def test_body_of_many_chunks_arrives_whole(gateway: Gateway) -> None:
    text = "z" * 900_000
    assert (await gateway.post({"prompt": text}))[0] == 200
    assert gateway.east.bodies[0]["prompt"] == list(text.encode())[:-1]


@pytest.mark.parametrize("body_mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
async def test_body_that_ends_with_trailers_is_routed(tmp_path: Path, body_mode: str) -> None:
    body = json.dumps({"model": MODEL, "prompt": SHORT})
    head = "POST /v1/completions HTTP/1.1\r\nHost: front\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    async with make_gateway(tmp_path, body_mode=body_mode) as gateway:
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


async def test_picker_answers_requests_that_cannot_be_served(gateway: Gateway) -> None:
    async with gateway.session.post(f"{gateway.url}/v1/completions", data=b"{") as response:
        assert (response.status, "not JSON" in await response.text()) == (400, True)
    status, body, _ = await gateway.post({"prompt": SHORT, "kv_transfer_params": {"x": 1}})
    assert (status, b"kv_transfer_params" in body) == (400, True)
    gateway.west.healthy = False
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await gateway.post({"prompt": SHORT}))[0] != 503:  # noqa: ASYNC110 - asked over HTTP
            await asyncio.sleep(0.02)


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


async def test_gateway_clients_need_a_key(tmp_path: Path) -> None:
    write_secret(tmp_path / "keys", "ours\n")
    async with make_gateway(tmp_path, api_keys_file=tmp_path / "keys") as gateway:
        assert (await gateway.post({"prompt": SHORT}))[0] == 401
        assert (await gateway.post({"prompt": SHORT}, Authorization="Bearer ours"))[0] == 200


async def test_body_above_the_limit_is_refused(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 10_000)
    status, body, _ = await gateway.post({"prompt": "z" * 20_000})
    assert (status, json.loads(body)["error"]["code"]) == (413, 413)
    assert (await gateway.post({"prompt": SHORT, "model": MODEL}))[0] == 200
