"""Bound on the watchers of a dashboard."""

import asyncio
from contextlib import AsyncExitStack

import aiohttp
import pytest

from prfaas.manager.dashboard.feed import MAX_WATCHERS
from tests.support.deployment import Deployment
from tests.support.waiting import PATIENCE_SECONDS, POLL_SECONDS


async def test_further_watcher_is_refused(deployment: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    manager = await deployment.start_manager()
    url = f"http://{manager.http_address}/dashboard/events"
    async with AsyncExitStack() as stack, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        watching = await asyncio.gather(*(stack.enter_async_context(session.get(url)) for _ in range(MAX_WATCHERS)))
        for response in watching:
            assert response.status == 200 and (await response.content.readline()).startswith(b"event: now")
        async with session.get(url) as refused:
            assert refused.status == 503
            assert (await refused.json())["error"] == f"{MAX_WATCHERS} pages watch this manager already"
        watching[0].close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await _is_admitted(session, url):  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(POLL_SECONDS)
        assert not [record for record in caplog.records if record.name == "aiohttp.server"], "a closed page is no error"


async def _is_admitted(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(url) as response:
        return response.status == 200
