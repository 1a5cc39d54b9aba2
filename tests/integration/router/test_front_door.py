"""The front door over real sockets: both legs, every failure before and after the first token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from prfaas import grants
from prfaas.hashing import HashChain, root_hash
from prfaas.router.app import Router, make_app
from prfaas.router.config import ClusterConfig, InstanceConfig, RouterConfig
from prfaas.router.deciding import Deciding
from prfaas.router.fleet import Fleet
from tests.integration.router.paced_engine import MODEL, PacedEngine
from tests.waiting import until

SECRET = b"s" * 32
T = 100
SHORT, LONG = "x" * T, "y" * (T + 1)
STREAMED = b"".join(b'data: {"choices": [{"text": "%c"}]}\n\n' % c for c in b"abc") + b"data: [DONE]\n\n"


@dataclass
class Door:
    """A router before a prefill and a decode engine."""

    url: str
    east: PacedEngine
    west: PacedEngine
    session: aiohttp.ClientSession

    async def post(
        self, body: dict[str, Any], *, path: str = "/v1/completions", **headers: str
    ) -> tuple[int, bytes, Any]:
        async with self.session.post(self.url + path, json={"model": MODEL, **body}, headers=headers) as response:
            return response.status, await response.read(), response.headers


@contextlib.asynccontextmanager
async def _door(**settings: Any) -> AsyncIterator[Door]:
    east, west = PacedEngine(), PacedEngine()
    await east.start()
    await west.start()
    clusters = (_cluster("east", "prfaas", "prefill", east), _cluster("west", "pd", "both", west))
    config = RouterConfig(
        secret_file="-", clusters=clusters, threshold_tokens=T, **({"probe_interval": 0.1} | settings)
    )
    async with aiohttp.ClientSession() as session:
        fleet = Fleet(config, session)
        router = Router(config, fleet=fleet, deciding=Deciding(config, SECRET, fleet, None), session=session)
        probing = asyncio.create_task(fleet.probe_forever())
        runner = web.AppRunner(make_app(router, max_body_bytes=config.max_body_bytes), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        door = Door(f"http://127.0.0.1:{runner.addresses[0][1]}", east, west, session)
        await until(lambda: all(instance.healthy for instance in fleet))
        yield door
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
        await runner.cleanup()
    await east.stop()
    await west.stop()


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with _door() as made:
        yield made


def _cluster(name: str, kind: str, role: str, engine: PacedEngine) -> ClusterConfig:
    instance = InstanceConfig(name=f"{name}/0", url=engine.url, role=role, agent=f"agent-{name}", wire="127.0.0.1:7400")
    return ClusterConfig(name=name, kind=kind, instances=(instance,))


async def test_a_short_prompt_goes_through_untouched(door: Door) -> None:
    status, body, headers = await door.post({"prompt": SHORT, "stream": True, "user": "me"})
    assert (status, body) == (200, STREAMED)
    assert (headers["x-prfaas-route"], headers["x-prfaas-reason"]) == ("local", "short")
    assert door.west.bodies == [{"model": MODEL, "prompt": SHORT, "stream": True, "user": "me"}]
    assert door.east.bodies == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_long_prompt_goes_to_both_engines_under_one_grant(door: Door, stream: bool) -> None:
    status, body, headers = await door.post({"prompt": LONG, "stream": stream}, **{"x-request-id": "r1"})
    assert status == 200 and (body == STREAMED or not stream)
    assert (headers["x-prfaas-route"], headers["x-request-id"]) == ("remote", "r1")
    tokens = list(LONG.encode())
    prefill, decode = door.east.bodies[0], door.west.bodies[0]
    assert (prefill["prompt"], decode["prompt"]) == (tokens[:-1], tokens)
    assert door.east.request_ids == door.west.request_ids == ["r1"]
    texts = {prefill["kv_transfer_params"]["prfaas_grant"], decode["kv_transfer_params"]["prfaas_grant"]}
    assert len(texts) == 1
    grant = grants.verify(grants.from_text(texts.pop()), grants.derive_key(SECRET, "grant"), now=0.0)
    assert (grant.source, grant.destination, grant.num_tokens) == ("agent-east", "agent-west", T)
    assert grant.prompt_hash == HashChain(root_hash(MODEL), tokens[:-1]).at(T)
    assert headers["x-prfaas-transfer"] == grant.transfer_id.hex()


async def test_a_long_chat_carries_the_token_ids_that_were_rendered(door: Door) -> None:
    messages = [{"role": "user", "content": LONG}]
    status, _, headers = await door.post({"messages": messages, "stream": True}, path="/v1/chat/completions")
    assert status == 200 and headers["x-prfaas-route"] == "remote"
    rendered = door.west.bodies[0]["kv_transfer_params"]["prompt_token_ids"]
    assert door.west.bodies[0]["messages"] == messages
    assert door.east.bodies[0]["prompt"] == rendered[:-1]


async def test_an_adapter_stays_local(door: Door) -> None:
    _, _, headers = await door.post({"prompt": LONG, "model": "adapter"})
    assert headers["x-prfaas-reason"] == "not_transferable"


@pytest.mark.parametrize("failure", ["error", "gone", "reset"])
async def test_a_prefill_that_fails_ends_in_a_local_answer(door: Door, failure: str) -> None:
    door.west.prefill_seconds = 1.0  # as an engine that waits for its KV
    if failure == "error":
        door.east.status = 500
    elif failure == "gone":
        await door.east.stop()
    else:
        door.east.prefill_seconds = 5.0
        asyncio.get_running_loop().call_later(0.1, lambda: asyncio.ensure_future(door.east.stop()))
    status, body, headers = await door.post({"prompt": LONG, "stream": True})
    assert (status, body) == (200, STREAMED)
    assert headers["x-prfaas-fallback"].startswith("prefill_")
    assert "kv_transfer_params" not in door.west.bodies[-1]
    await until(lambda: door.west.num_broken_off == 1)


async def test_a_decode_engine_that_breaks_off_after_a_token_breaks_the_answer_off(door: Door) -> None:
    door.west.break_after_tokens = 1
    door.west.token_seconds = 0.05
    with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
        await door.post({"prompt": LONG, "stream": True})


async def test_a_client_that_goes_ends_both_legs(door: Door) -> None:
    door.east.prefill_seconds = door.west.prefill_seconds = 30.0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await door.post({"prompt": LONG, "stream": True})
    await until(lambda: (door.east.num_broken_off, door.west.num_broken_off) == (1, 1))


async def test_nobody_to_answer_is_a_503_in_openais_form(door: Door) -> None:
    await door.west.stop()
    status, body, _ = await door.post({"prompt": SHORT})
    assert status == 503 and b'"error"' in body and b"service_unavailable" in body
    async with door.session.get(f"{door.url}/health") as response:
        assert response.status == 503


async def test_an_unhealthy_prefill_engine_is_not_asked(door: Door) -> None:
    door.east.healthy = False

    async def goes_local() -> bool:
        _, _, headers = await door.post({"prompt": LONG})
        return bool(headers["x-prfaas-reason"] == "no_prefill_instance")

    deadline = asyncio.get_running_loop().time() + 5
    while not await goes_local():
        assert asyncio.get_running_loop().time() < deadline


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"prompt": SHORT, "kv_transfer_params": {"do_remote_prefill": True}}, 400, "kv_transfer_params"),
        ({"prompt": SHORT, "cache_salt": "mine"}, 400, "cache_salt"),
        ({}, 400, "prompt: missing"),
        ({"prompt": "z" * 5000}, 413, "over 4096 bytes"),
    ],
)
async def test_a_bad_request_is_refused_by_its_field(body: dict[str, Any], status: int, named: str) -> None:
    async with _door(max_body_bytes=4096) as door:
        got, text, _ = await door.post(body)
        assert got == status and named in text.decode()
        assert door.west.bodies == []


async def test_an_answer_that_does_not_end_in_time_is_a_504() -> None:
    async with _door(request_timeout=0.3) as door:
        door.west.prefill_seconds = 30.0
        status, body, _ = await door.post({"prompt": SHORT})
        assert status == 504 and b"timeout" in body
        await until(lambda: door.west.num_broken_off == 1)


async def test_other_paths_are_passed_on_and_decisions_are_explained(door: Door) -> None:
    status, body, _ = await door.post({"input": "x"}, path="/v1/embeddings")
    assert status == 200 and b'"input": "x"' in body
    async with door.session.get(f"{door.url}/v1/models") as response:
        assert (await response.json())["data"][0]["id"] == MODEL
    await door.post({"prompt": LONG}, **{"x-request-id": "r2"})
    async with door.session.get(f"{door.url}/debug/decision/r2") as response:
        record = await response.json()
    assert (record["route"], record["num_prompt_tokens"], record["decided_by"]) == ("remote", T + 1, "router")
    assert "exceed the threshold" in record["explanation"]
    async with door.session.get(f"{door.url}/debug/decision/none") as response:
        assert response.status == 404
    async with door.session.get(f"{door.url}/metrics") as response:
        assert b'prfaas_router_requests_total{reason="long",route="remote"}' in await response.read()
