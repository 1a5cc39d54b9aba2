"""Router before two real engines, which tokenise texts and chats: answers equal those of one engine."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from prfaas.router.config import ClusterConfig, InstanceConfig, RouterConfig
from prfaas.router.server import open_router
from prfaas.types import ClusterKind, InstanceRole
from tests.support.engine_deployment import CHUNK_TOKENS, random_prompt
from tests.support.engine_pair import MAX_MODEL_LEN, EnginePair, post
from tests.support.secret_files import write_secret
from tests.support.waiting import PATIENCE_SECONDS, until, wait_until
from tools.demo.client import prefilled_tokens, transfers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.parametrize("pair", ["llama"], indirect=True)]
T = CHUNK_TOKENS
LONG_TEXT = "".join(f"{number} bottles, " for number in range(60))  # One token per byte.
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "extra_body": {"ignore_eos": True}}
ALONE: dict[str, Any] = {**GREEDY, "extra_body": {"ignore_eos": True, "cache_salt": "alone"}}


@pytest.fixture
async def client(pair: EnginePair) -> AsyncIterator[openai.AsyncOpenAI]:
    """Yield an OpenAI client of a router before the pair."""
    async with running_router(pair) as url, open_client(url) as openai_client:
        await openai_client.models.list()  # Repeats while the reply is 503: until a probe has seen the engines.
        yield openai_client


@contextlib.asynccontextmanager
async def running_router(pair: EnginePair, **settings: Any) -> AsyncIterator[str]:
    clusters = (
        cluster("east", "prfaas", "prefill", pair.prefill.url, pair.east.wire),
        cluster("west", "pd", "both", pair.decode.url, pair.west.wire),
    )
    defaults: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "secret_file": "-",
        "threshold_tokens": T,
        "probe_interval": 0.2,
        "silence_seconds": PATIENCE_SECONDS,  # Engines of one process answer late during a long step.
    }
    config = RouterConfig(**({"clusters": clusters} | defaults | settings))
    secret = pair.secret
    async with open_router(config, secret) as address:
        yield f"http://{address}"


def cluster(name: str, kind: ClusterKind, role: InstanceRole, url: str, wire: str) -> ClusterConfig:
    instance = InstanceConfig(name=f"{name}/0", url=url, role=role, agent=name, wire=wire)
    return ClusterConfig(name=name, kind=kind, instances=(instance,))


def open_client(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=20)


async def _is_transferred(pair: EnginePair, headers: Any) -> bool:
    """Return whether the transfer of a remote answer completed."""
    outcomes: list[str] = []

    def ended() -> bool:
        record = transfers(pair.west.status_url).get(headers["x-prfaas-transfer"], {})
        outcomes.append(str(record.get("outcome", "running")))
        return outcomes[-1] != "running"

    await until(ended, what="the transfer's end")
    return outcomes[-1] == "completed"


async def test_a_long_text_is_transferred_and_answered_as_by_one_engine(
    pair: EnginePair, client: openai.AsyncOpenAI
) -> None:
    raw = await client.completions.with_raw_response.create(model=pair.family, prompt=LONG_TEXT, **GREEDY)
    assert raw.headers["x-prfaas-route"] == "remote"
    async with open_client(pair.decode.url) as alone:
        wanted = await alone.completions.create(model=pair.family, prompt=LONG_TEXT, **ALONE)
    answer = raw.parse()
    assert answer.choices[0].text == wanted.choices[0].text
    assert answer.usage == wanted.usage
    assert await _is_transferred(pair, raw.headers)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_chat_is_transferred_and_answered_as_by_one_engine(
    pair: EnginePair, client: openai.AsyncOpenAI, stream: bool
) -> None:
    messages: Any = [{"role": "system", "content": "Count."}, {"role": "user", "content": f"{stream} {LONG_TEXT}"}]
    async with open_client(pair.decode.url) as alone:
        wanted = await alone.chat.completions.create(model=pair.family, messages=messages, **ALONE)
    sent: Any = {"model": pair.family, "messages": messages, "stream": stream, **GREEDY}
    raw = await client.chat.completions.with_raw_response.create(**sent)
    assert raw.headers["x-prfaas-route"] == "remote"
    answer: Any = raw.parse()
    text = "".join([event.choices[0].delta.content or "" async for event in answer]) if stream else None
    assert (text if stream else answer.choices[0].message.content) == wanted.choices[0].message.content
    assert await _is_transferred(pair, raw.headers)


async def test_a_client_reuses_kv_of_its_own_tenant_only(pair: EnginePair, tmp_path: Path) -> None:
    write_secret(tmp_path / "clients", "key-a alice\nkey-b bob\n")
    async with running_router(pair, api_keys_file=tmp_path / "clients", threshold_tokens=2 * T) as url:

        async def ask(key: str, prompt: str) -> tuple[int, Any]:
            before = prefilled_tokens(pair.decode.url)
            async with open_client(url, key) as keyed_client:
                raw = await keyed_client.completions.with_raw_response.create(
                    model=pair.family, prompt=prompt, **GREEDY
                )
            return prefilled_tokens(pair.decode.url) - before, raw.headers

        short = "Nobody has asked this before. " + LONG_TEXT[: 2 * T - 60]
        first, headers = await ask("key-a", short)
        assert headers["x-prfaas-route"] == "local"
        async with asyncio.timeout(60):
            while (
                again := (await ask("key-a", short))[0]
            ) >= first:  # Until the KV of the first answer is in the pool.
                pass
        assert (await ask("key-b", short))[0] == first > again
        _, headers = await ask("key-a", "Nor this. " + LONG_TEXT)
    assert headers["x-prfaas-route"] == "remote"
    assert await _is_transferred(pair, headers), "router and engines hash alike under a salt"


async def test_short_requests_stay_local_and_engine_errors_reach_the_client(
    pair: EnginePair, client: openai.AsyncOpenAI
) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model=pair.family, messages=[{"role": "user", "content": "hello"}], **GREEDY
    )
    assert (raw.headers["x-prfaas-route"], raw.headers["x-prfaas-reason"]) == ("local", "short")
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="unheard-of", prompt=LONG_TEXT)
    with pytest.raises(openai.BadRequestError, match="context"):
        await client.completions.create(model=pair.family, prompt=LONG_TEXT * 20, **GREEDY)


async def _ask(
    pair: EnginePair, url: str, prompt: list[int], **more: Any
) -> tuple[int, dict[str, Any], dict[str, str]]:
    body = {"model": pair.family, "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 16}
    return await asyncio.to_thread(post, url, body | {"return_token_ids": True} | more)


@contextlib.asynccontextmanager
async def _transferring_router(pair: EnginePair, *, seed: int) -> AsyncIterator[str]:
    """Yield the URL of a router whose grants last an hour, so that no transfer ends by its deadline.

    Check that a request is transferred before and after, and that nothing is left then.
    """

    async def ask() -> Any:
        _, _, headers = await _ask(pair, url, random_prompt(3 * T, seed=next(seeds)))
        return headers

    seeds = itertools.count(seed)
    async with running_router(pair, transfer_deadline=3600.0) as url:
        async with asyncio.timeout(60):
            while (await ask()).get("x-prfaas-route") != "remote":  # Until both engines have been probed.
                pass
        yield url
        assert await _is_transferred(pair, await ask())
        await asyncio.to_thread(wait_until, pair.nothing_is_left, what="agents without transfers")


async def test_an_engines_refusal_reaches_the_client_unchanged_and_leaves_no_transfer(pair: EnginePair) -> None:
    prompt = random_prompt(MAX_MODEL_LEN - T, seed=9000)
    status, wanted, _ = await _ask(pair, pair.decode.url, prompt, temperature=-1)
    assert status == 400
    async with _transferring_router(pair, seed=9100) as url:
        status, answer, headers = await _ask(pair, url, prompt, temperature=-1)
        assert (status, answer, headers["x-prfaas-route"]) == (400, wanted, "remote")


async def test_a_prompt_longer_than_the_model_is_refused_before_it_reaches_an_engine(pair: EnginePair) -> None:
    async with _transferring_router(pair, seed=9200) as url:
        status, answer, headers = await _ask(pair, url, random_prompt(MAX_MODEL_LEN + T, seed=9201))
        assert status == 400 and str(MAX_MODEL_LEN) in str(answer) and "x-prfaas-route" not in headers


async def test_a_refused_prefill_leg_ends_in_a_local_answer_and_leaves_no_transfer(pair: EnginePair) -> None:
    """The whole prompt is too long; the decode engine is told to truncate it."""
    prompt = random_prompt(MAX_MODEL_LEN + T, seed=9300)
    cut = {"truncate_prompt_tokens": 2 * T}
    status, wanted, _ = await _ask(pair, pair.decode.url, prompt, cache_salt="alone", **cut)
    assert status == 200
    async with _transferring_router(pair, seed=9301) as url:
        status, answer, headers = await _ask(pair, url, prompt, **cut)
        assert (status, headers["x-prfaas-route"]) == (200, "remote")
        assert answer["choices"][0]["token_ids"] == wanted["choices"][0]["token_ids"]
