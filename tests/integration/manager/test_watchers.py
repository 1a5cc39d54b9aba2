"""Bound on the watchers of a dashboard."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import aiohttp
from prometheus_client import REGISTRY

from prfaas.manager.dashboard.feed import MAX_WATCHERS
from tests.support.deployment import Deployment
from tests.support.waiting import until


def _num_watchers() -> float | None:
    return REGISTRY.get_sample_value("prfaas_manager_dashboard_watchers")


async def test_further_watcher_is_refused(deployment: Deployment) -> None:
    manager = await deployment.start_manager()
    url = f"http://{manager.http_address}/dashboard/events"
    before = REGISTRY.get_sample_value("prfaas_manager_dashboard_refusals_total") or 0.0
    async with (
        AsyncExitStack() as stack,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        watching = await asyncio.gather(*(stack.enter_async_context(session.get(url)) for _ in range(MAX_WATCHERS)))
        for response in watching:
            assert response.status == 200 and (await response.content.readline()).startswith(b"event: history")
        async with session.get(url) as refused:
            assert refused.status == 503
            assert (await refused.json())["error"] == f"{MAX_WATCHERS} pages watch this manager already"
        assert REGISTRY.get_sample_value("prfaas_manager_dashboard_refusals_total") == before + 1
        watching[0].close()
        await until(lambda: _num_watchers() == MAX_WATCHERS - 1, what="a place")
        async with session.get(url) as next_one:
            assert next_one.status == 200
    await until(lambda: _num_watchers() == 0, what="that nobody watches")
