"""Real engines that freeze: SIGSTOP of the engine that prefills, and of one of two that decode."""

from __future__ import annotations

import time

import pytest

from prfaas.router.config import ClusterConfig, InstanceConfig
from tests.e2e.test_router import open_client, running_router
from tests.support.engine_deployment import CHUNK_TOKENS, random_prompt
from tests.support.engine_pair import EnginePair
from tests.support.paused_process import paused

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("pair", ["llama"], indirect=True),
]
MAX_ADDED_SECONDS = 5.0
SILENCE = {"silence_seconds": 2.0, "probe_interval": 1.0}
LENGTH = 3 * CHUNK_TOKENS


async def _timed_answer(url: str, pair: EnginePair, prompt: list[int]) -> tuple[float, str, str | None]:
    """Return the seconds of an answer, its text, and why it fell back."""
    async with open_client(url) as client:
        started = time.monotonic()
        raw = await client.completions.with_raw_response.create(
            model=pair.family, prompt=prompt, temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
        )
        seconds = time.monotonic() - started
        return seconds, raw.parse().choices[0].text, raw.headers.get("x-prfaas-fallback")


async def test_frozen_prefill_engine_costs_seconds_and_no_token(pair: EnginePair) -> None:
    prompt, warm_up = random_prompt(LENGTH, seed=901), random_prompt(LENGTH, seed=902)
    async with running_router(pair, **SILENCE) as url, open_client(url) as client:
        await client.models.list()
        local_seconds, _, _ = await _timed_answer(pair.decode.url, pair, warm_up)
        with paused(pair.prefill.child.process.pid):
            seconds, text, fallback = await _timed_answer(url, pair, prompt)
        assert fallback == "prefill_silent"
        assert seconds - local_seconds < MAX_ADDED_SECONDS
        _, alone, _ = await _timed_answer(pair.decode.url, pair, prompt)
        assert text == alone


async def test_frozen_decode_engine_loses_its_requests_to_another(pair: EnginePair) -> None:
    engines = {"east": pair.prefill, "west": pair.decode}
    instances = tuple(
        InstanceConfig(name=f"{name}/0", url=engine.url, role="both", agent=name, wire=pair.agents[name].wire)
        for name, engine in engines.items()
    )
    clusters = (ClusterConfig(name="west", kind="pd", instances=instances),)
    prompts = [random_prompt(64, seed=910 + number) for number in range(4)]
    async with running_router(pair, clusters=clusters, **SILENCE) as url, open_client(url) as client:
        await client.models.list()
        local_seconds = max([(await _timed_answer(pair.decode.url, pair, prompt))[0] for prompt in prompts[:2]])
        with paused(pair.prefill.child.process.pid):
            for prompt in prompts:
                seconds, _, _ = await _timed_answer(url, pair, prompt)
                assert seconds - local_seconds < MAX_ADDED_SECONDS
