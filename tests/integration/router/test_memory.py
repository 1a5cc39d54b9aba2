"""Memory of a router whose requests fail: nothing that a request held outlives it."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.paced_engine import MODEL
from tests.support.router_process import RouterProcess, running_processes

MAX_GROWTH_BYTES = 100 << 20
COUNTS = [48, pytest.param(1024, marks=pytest.mark.soak)]


async def _send(router: RouterProcess, body: dict[str, Any], count: int, *, status: int) -> int:
    """Send a request `count` times, four at a time, and return the growth of the router's memory in bytes."""
    before, raw = router.resident_bytes, json.dumps(body).encode()
    async with aiohttp.ClientSession() as session:

        async def send() -> None:
            async with session.post(f"{router.url}/v1/completions", data=io.BytesIO(raw)) as response:
                await response.read()
                assert response.status == status

        for _ in range(count // 4):
            await asyncio.gather(*(send() for _ in range(4)))
    return router.resident_bytes - before


@pytest.mark.parametrize("count", COUNTS)
async def test_failed_requests_leave_no_bodies_in_memory(tmp_path: Path, count: int) -> None:
    body = {"model": MODEL, "prompt": "x", "metadata": "x" * (4 << 20)}
    with running_processes(tmp_path, decode=({"status": 500}, {"status": 500})) as router:
        assert await _send(router, body, count, status=500) < MAX_GROWTH_BYTES


@pytest.mark.parametrize("count", COUNTS)
async def test_fallbacks_leave_no_tokens_in_memory(tmp_path: Path, count: int) -> None:
    body = {"model": MODEL, "prompt": list(range(1, 100_001))}
    with running_processes(tmp_path, prefill=({"refuses_transfers": True},)) as router:
        assert await _send(router, body, count, status=200) < MAX_GROWTH_BYTES
