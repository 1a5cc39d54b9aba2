"""Engines that freeze without closing their connections, as in a stalled virtual machine: SIGSTOP under load."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.paced_engine import MODEL
from tests.support.paused_process import paused
from tests.support.router import LONG, SHORT, T
from tests.support.router_process import RouterProcess, running_processes

# The largest added wait: detection takes `probe_interval` and `silence_seconds`, 3 s by default.
MAX_ADDED_SECONDS = 5.0
PREFILL_SECONDS = 0.3
_log = logging.getLogger(__name__)
PAUSES = [8.0, pytest.param(45.0, marks=pytest.mark.soak)]


async def _ask(session: aiohttp.ClientSession, url: str, prompt: str) -> tuple[int, float]:
    """Return the status of an answer, and its time in seconds."""
    started = time.monotonic()
    async with session.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": prompt}) as response:
        await response.read()
        return response.status, time.monotonic() - started


async def _under_load(router: RouterProcess, name: str, prompts: Sequence[str], seconds: float) -> list[float]:
    """Send a request every 100 ms while an engine is paused, and return the times of the answers, none of which failed."""
    async with aiohttp.ClientSession() as session:
        asking = [asyncio.create_task(_ask(session, router.url, prompts[0])) for _ in range(8)]
        await asyncio.sleep(PREFILL_SECONDS / 3)  # The requests are with the engines.
        with paused(router.engines[name].process.pid):
            for number in range(int(10 * seconds)):
                asking.append(asyncio.create_task(_ask(session, router.url, prompts[number % len(prompts)])))
                await asyncio.sleep(0.1)
            answers = await asyncio.gather(*asking)
    assert {status for status, _ in answers} == {200}
    return [taken for _, taken in answers]


@pytest.mark.parametrize("seconds", PAUSES)
@pytest.mark.parametrize("name", ["west-0", "east-0"])
async def test_no_request_waits_for_a_frozen_engine(tmp_path: Path, name: str, seconds: float) -> None:
    engines: Any = ({"prefill_seconds": PREFILL_SECONDS},) * 2
    with running_processes(tmp_path, prefill=engines, decode=engines, threshold_tokens=T) as router:
        times = await _under_load(router, name, [LONG, SHORT], seconds)
    local_seconds = 2 * PREFILL_SECONDS
    added = sorted(taken - local_seconds for taken in times)
    delayed = sum(seconds > 0.5 for seconds in added)
    _log.info("%s: %d of %d delayed, worst added %.2f s", name, delayed, len(times), added[-1])
    assert added[-1] < MAX_ADDED_SECONDS


async def test_only_decode_engine_keeps_its_requests_while_it_is_frozen(tmp_path: Path) -> None:
    with running_processes(tmp_path, silence_seconds="300ms", probe_interval="100ms") as router:
        async with aiohttp.ClientSession() as session:
            with paused(router.engines["west-0"].process.pid):
                asking = [asyncio.create_task(_ask(session, router.url, SHORT)) for _ in range(4)]
                await _until_unhealthy(session, router)
                assert not any(task.done() for task in asking)
            assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 4


async def test_stream_of_a_frozen_engine_ends_by_an_error(tmp_path: Path) -> None:
    settings: Any = {"silence_seconds": "200ms", "probe_interval": "100ms"}
    with running_processes(tmp_path, decode=({"token_seconds": 0.5},), **settings) as router:
        async with aiohttp.ClientSession() as session:
            events = _events(session, router.url)
            assert "choices" in await anext(events)
            with paused(router.engines["west-0"].process.pid):
                assert (await anext(events))["error"]["code"] == 502
                with pytest.raises(aiohttp.ClientPayloadError):
                    await anext(events)


async def _events(session: aiohttp.ClientSession, url: str) -> AsyncIterator[dict[str, Any]]:
    body = {"model": MODEL, "prompt": SHORT, "stream": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


async def _until_unhealthy(session: aiohttp.ClientSession, router: RouterProcess) -> None:
    async with asyncio.timeout(20):
        while True:
            async with session.get(f"{router.url}/health") as response:
                if not (await response.json())["instances"]["west-0"]:
                    return
            await asyncio.sleep(0.05)
