"""Envoy, endpoint picker and sidecar before two real engines: answers stay equal, even if the prefill engine is killed."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prfaas.router.config import RouterConfig
from prfaas.router.ext_proc.server import open_picker
from prfaas.router.server import open_router
from prfaas.router.sidecar.config import SidecarConfig
from prfaas.router.sidecar.server import open_sidecar
from tests.e2e.test_router import cluster
from tests.integration.router.gateway import start_envoy
from tests.support.engine_deployment import CHUNK_TOKENS, random_prompt
from tests.support.engine_pair import NUM_OUTPUT_TOKENS, EnginePair, num_outcomes, resumes_at
from tests.support.waiting import until
from tools.demo.client import Answer, complete, is_answering, prefilled_tokens, transfers
from tools.free_ports import free_address
from tools.processes import Children

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.parametrize("pair", ["llama"], indirect=True)]
LONG_TOKENS, SHORT_TOKENS = 4000, 100


@contextlib.asynccontextmanager
async def _gateway(pair: EnginePair, directory: Path) -> AsyncIterator[str]:
    """Yield Envoy's URL, once it answers."""
    picker, front = free_address(), free_address()
    beside = SidecarConfig(listen="127.0.0.1:0", engine_url=pair.decode.url, protocol="prfaas")
    async with contextlib.AsyncExitStack() as stack:
        sidecar = await stack.enter_async_context(open_sidecar(beside))
        config = RouterConfig(
            listen="127.0.0.1:0",
            ext_proc_listen=picker,
            secret_file="-",
            threshold_tokens=CHUNK_TOKENS,
            probe_interval=0.2,
            clusters=(
                cluster("east", "prfaas", "prefill", pair.prefill.url, pair.east.wire),
                cluster("west", "pd", "both", f"http://{sidecar}", pair.west.wire),
            ),
        )
        secret = pair.secret
        await stack.enter_async_context(open_router(config, secret, picker=open_picker))
        start_envoy(stack.enter_context(Children(directory)), directory, front=front, picker=picker)
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(is_answering, f"http://{front}/v1/models"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield f"http://{front}"


async def _ask(pair: EnginePair, url: str, prompt: list[int]) -> Answer:
    body = {"model": pair.family, "prompt": prompt, "temperature": 0, "ignore_eos": True}
    return await asyncio.to_thread(complete, url, body | {"max_tokens": NUM_OUTPUT_TOKENS})


def _ended(pair: EnginePair) -> bool:
    """Return whether all transfers have ended on both sides."""
    records = [record for agent in (pair.east, pair.west) for record in transfers(agent.status_url).values()]
    return all(record["outcome"] != "running" for record in records)


async def test_answers_through_envoy_are_those_of_one_engine(pair: EnginePair, tmp_path: Path) -> None:
    async with _gateway(pair, tmp_path) as url:
        for num_tokens, route in ((SHORT_TOKENS, "local"), (LONG_TOKENS, "remote")):
            prompt = random_prompt(num_tokens, seed=7000 + num_tokens)
            answer = await _ask(pair, url, prompt)
            assert answer.token_ids == await asyncio.to_thread(pair.alone, prompt)
            assert answer.headers["x-prfaas-route"] == route
        arrived = transfers(pair.west.status_url)
        assert list(arrived.values())[-1]["outcome"] == "completed"


@pytest.mark.soak  # An engine takes most of a minute to start again.
async def test_a_killed_prefill_engine_leaves_no_transfer_and_is_used_again_after_its_restart(
    pair: EnginePair, tmp_path: Path
) -> None:
    """It then reuses the KV in its node's pool."""
    async with _gateway(pair, tmp_path) as url:
        prompt, stored = random_prompt(LONG_TOKENS, seed=8000), random_prompt(600, seed=7999)
        wanted = await asyncio.to_thread(pair.alone, prompt)
        expected = await asyncio.to_thread(pair.at, pair.prefill, stored)
        await until(lambda: num_outcomes(pair.prefill, "store", "completed") > 0, what="the blocks in the pool")
        known = transfers(pair.east.status_url).keys()
        asking = asyncio.create_task(_ask(pair, url, prompt))
        await until(lambda: transfers(pair.east.status_url).keys() - known, what="the transfer's begin")
        pair.kill_engine("east")
        answer = await asking
        assert answer.token_ids == wanted
        await until(lambda: _ended(pair), what="the end of all transfers")
        await asyncio.to_thread(pair.await_engine, "east")
        assert await asyncio.to_thread(pair.at, pair.prefill, stored) == expected
        assert prefilled_tokens(pair.prefill.url) == 600 - resumes_at(pair.layout(), 599), "the rest is in the pool"
        for seed in itertools.count(8001):  # Until the picker has seen the engine again.
            again = await _ask(pair, url, random_prompt(LONG_TOKENS, seed=seed))
            if again.headers["x-prfaas-route"] == "remote":
                break
