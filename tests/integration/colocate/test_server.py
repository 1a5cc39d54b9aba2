"""`prfaas-colocate serve` over HTTP: a real server, two real sides."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from prfaas.colocate import server
from prfaas.colocate.config import ColocateConfig
from prfaas.console.authority import Authority
from tests.support.certificates import tls_config
from tests.support.paused_process import paused
from tests.support.waiting import PATIENCE_SECONDS, until

# One server for all tests: a start takes seconds, because both sides load torch.
pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

START_SECONDS = 150.0  # Both sides load torch.

CONFIG = ColocateConfig(
    listen="127.0.0.1:0",
    shape="tiny",
    dtype="float64",
    num_blocks=100,
    max_rows=4,
    max_requests=8,
    max_tokens=600,
    num_threads=1,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[aiohttp.ClientSession]:
    """A client with a certificate, of a server beyond loopback."""
    issued = Authority(tmp_path_factory.mktemp("tls")).issue("somebody")
    config = replace(
        CONFIG,
        listen="0.0.0.0:0",
        tls=tls_config(issued),
    )
    bound = asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(server.serve(config, bound=bound))
    url = f"https://127.0.0.1:{(await bound).rpartition(':')[2]}"
    certificates = config.certificates()
    assert certificates is not None
    connector = aiohttp.TCPConnector(ssl=certificates.client_context())
    async with aiohttp.ClientSession(base_url=url, connector=connector) as session:
        async with asyncio.timeout(START_SECONDS):
            while not await is_alive(session):
                pass
        yield session
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def is_alive(http: aiohttp.ClientSession) -> bool:
    """Return whether both sides run, which begin after the server has."""
    async with http.get("/healthz") as response:
        return response.status == 200


async def complete(http: aiohttp.ClientSession, **body: object) -> tuple[int, dict[str, object]]:
    async with http.post("/v1/completions", json=body) as response:
        return response.status, await response.json()


async def test_beyond_loopback_it_takes_the_deployments_certificates_alone(http: aiohttp.ClientSession) -> None:
    before = tls_refusals("tls_none")
    async with aiohttp.ClientSession() as plain:
        with pytest.raises(aiohttp.ClientError):
            await plain.get(str(http._build_url("/healthz")).replace("https", "http"))
    await until(lambda: tls_refusals("tls_none") > before, what="the count of a plain client")


def tls_refusals(reason: str) -> float:
    return REGISTRY.get_sample_value("prfaas_colocate_tls_refusals_total", {"reason": reason}) or 0.0


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_body_that_cannot_be_decoded_is_refused(http: aiohttp.ClientSession, path: str) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with http.post(path, data=b"no gzip", headers=headers) as response:
        assert (response.status, response.headers["Connection"]) == (400, "close")


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_charset_that_nobody_knows_changes_nothing(http: aiohttp.ClientSession, path: str) -> None:
    headers = {"Content-Type": "application/json; charset=zz"}
    async with http.post(path, data=b'{"prompt": "a", "max_tokens": 1}', headers=headers) as response:
        assert response.status == 200


async def test_a_streamed_answer_has_the_tokens_and_the_text_of_a_whole_one(http: aiohttp.ClientSession) -> None:
    status, whole = await complete(http, prompt="hello", max_tokens=8)
    assert status == 200 and whole["usage"]["total_tokens"] == 13  # type: ignore[index]
    tokens: list[int] = []
    text, reasons = "", []
    async with http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 8, "stream": True}) as response:
        lines = [line.decode().strip() async for line in response.content if line.strip()]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        tokens += choice["token_ids"]
        text += choice["text"]
        reasons.append(choice["finish_reason"])
    (choice,) = whole["choices"]  # type: ignore[misc]
    assert (tokens, text) == (choice["token_ids"], choice["text"])
    assert reasons == [None] * 7 + ["length"]


async def test_token_ids_and_their_text_are_the_same_prompt_and_a_stop_token_stops(http: aiohttp.ClientSession) -> None:
    _, by_text = await complete(http, prompt="ab", max_tokens=6)
    _, by_ids = await complete(http, prompt=[97, 98], max_tokens=6)
    tokens = by_text["choices"][0]["token_ids"]  # type: ignore[index]
    assert tokens == by_ids["choices"][0]["token_ids"]  # type: ignore[index]
    _, stopped = await complete(http, prompt="ab", max_tokens=6, stop_token_ids=[tokens[2]])
    assert stopped["choices"][0]["token_ids"] == tokens[: tokens.index(tokens[2]) + 1]  # type: ignore[index]
    assert stopped["choices"][0]["finish_reason"] == "stop"  # type: ignore[index]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ["a", "b"]}, "one list of token ids"),
        ({"prompt": "a", "temperature": 1}, "greedily"),
        ({"prompt": "a" * 700}, "more than this executor can hold"),
        ({"prompt": [5000]}, "token ids go from 0 to 319"),
        ({"prompt": ""}, "at least one prompt token"),
        ({"prompt": "a", "stop_token_ids": ["x"]}, "stop_token_ids: at most one token id"),
        ({"prompt": "a", "stream": "yes"}, "stream: true or false"),
    ],
)
async def test_what_cannot_be_done_is_refused_with_the_reason(
    http: aiohttp.ClientSession, body: dict[str, object], message: str
) -> None:
    status, answer = await complete(http, **body)
    assert status == 400 and message in answer["error"]["message"]  # type: ignore[index]


async def test_a_model_that_is_not_served_is_not_found_and_the_one_that_is_named(http: aiohttp.ClientSession) -> None:
    status, answer = await complete(http, model="gpt-9", prompt="a", max_tokens=1)
    assert status == 404
    assert answer["error"] == {
        "message": "the model 'gpt-9' does not exist; this executor serves 'prfaas-hybrid'",
        "type": "invalid_request_error",
        "code": "model_not_found",
    }
    status, _ = await complete(http, model="prfaas-hybrid", prompt="a", max_tokens=1)
    assert status == 200


async def test_the_death_of_a_side_shows_in_metrics_and_not_in_answers(http: aiohttp.ClientSession) -> None:
    body = {"prompt": "xyz", "max_tokens": 500}
    _, whole = await complete(http, **body)
    restarts = num_restarts()
    async with http.post("/v1/completions", json=body | {"stream": True}) as response:
        events = response.content.iter_any()
        streamed = await anext(events)  # The request runs.
        async with http.get("/status") as status:
            os.kill((await status.json())["pids"]["decode"], signal.SIGKILL)
        streamed += b"".join([more async for more in events])
    lines = [line.removeprefix("data: ") for line in streamed.decode().split("\n") if line]
    tokens = [token for line in lines[:-1] for token in json.loads(line)["choices"][0]["token_ids"]]
    assert tokens == whole["choices"][0]["token_ids"]  # type: ignore[index]
    await until(lambda: num_restarts() == restarts + 1, what="the count")
    async with http.get("/metrics") as response:
        assert f'prfaas_colocate_restarts_total{{side="decode"}} {restarts + 1}' in await response.text()


def num_restarts() -> float:
    return REGISTRY.get_sample_value("prfaas_colocate_restarts_total", {"side": "decode"}) or 0.0


@pytest.mark.parametrize("stream", [False, True])
async def test_the_request_of_a_client_that_goes_ends(http: aiohttp.ClientSession, stream: bool) -> None:
    """Decode stands still meanwhile, so that the answer cannot end by itself."""
    before = num_cancelled()
    decode = (await status_of(http))["pids"]["decode"]
    with paused(decode):
        asking = asyncio.ensure_future(complete(http, prompt="xyz", max_tokens=500, stream=stream))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (await status_of(http))["live_requests"]:
                pass
        asking.cancel()
        await until(lambda: num_cancelled() == before + 1, what="the end of the request")
        assert (await status_of(http))["live_requests"] == 0


async def status_of(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get("/status") as response:
        status: dict[str, Any] = await response.json()
        return status


def num_cancelled() -> float:
    return REGISTRY.get_sample_value("prfaas_colocate_requests_total", {"outcome": "cancelled"}) or 0.0


async def test_the_model_and_its_tokens_are_told(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/models") as response:
        assert (await response.json())["data"][0]["id"] == "prfaas-hybrid"
    async with http.post("/tokenize", json={"prompt": "hé"}) as response:
        assert (await response.json())["tokens"] == [104, 195, 169]
    async with http.get("/healthz") as response:
        assert response.status == 200
