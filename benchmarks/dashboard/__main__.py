"""`make bench AREA=dashboard`: seconds until a real Chromium shows a change; writes benchmarks/results/dashboard.json."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.integration.dashboard.browser import Window, chromium
from tests.integration.dashboard.test_page import BUSY, LAYOUT, Stage
from tests.support.deployment import Deployment, chain_of, stored

RESULTS = Path(__file__).resolve().parent.parent / "results" / "dashboard.json"
NUM_CHANGES = 30
WARM_UP = 3
BAR_SECONDS = 2.0
RUNNING = 'prfaas_manager_running_requests{cluster="east"}'
HELD = 'prfaas_manager_held_blocks{cluster="east",group="full_attention",tier="memory"}'
REQUESTS = 'prfaas_manager_decisions_total{reason="short",route="local"}'
GOODPUT = 'prfaas_manager_path_bytes_per_second{destination="west",source="east"}'
SHOWS = """([metric, value]) => [...document.querySelectorAll('[data-metric]')].some(
  its => its.dataset.metric === metric && Math.abs(Number(its.dataset.value) - value) < 1)"""


async def _seconds(window: Window, change: Callable[[int], Awaitable[tuple[str, float]]]) -> list[float]:
    """Return the delays of changes. `change` returns the metric and the value that the page will show."""
    found = []
    for number in range(WARM_UP + NUM_CHANGES):
        await asyncio.sleep(random.random())  # A random moment between two ticks of the feed.
        metric, value = await change(number)
        started = time.perf_counter()
        await window.page.wait_for_function(SHOWS, arg=[metric, value], polling="raf")
        found.append(time.perf_counter() - started)
    return found[WARM_UP:]


def _row(name: str, seconds: list[float]) -> dict[str, Any]:
    figure = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    shown = {key: round(value, 3) for key, value in figure.items()}
    bar = f"every one of {NUM_CHANGES} within {BAR_SECONDS:g} s"
    return {"name": name, "figure": shown, "bar": bar, "holds": max(seconds) <= BAR_SECONDS}


async def measure(directory: Path) -> list[dict[str, Any]]:
    """Return delays of a router's report, of an agent's report, and of the latter on another manager's page."""
    async with AsyncExitStack() as stack:
        open_window = await stack.enter_async_context(chromium())
        deployment = await stack.enter_async_context(Deployment(directory))
        stage = Stage(deployment, await open_window())
        await stage.start()
        second = await deployment.start_manager(name="other", expiry_seconds=60.0, lease_seconds=5.0)
        elsewhere = await open_window()
        await elsewhere.page.goto(f"http://{second.http_address}/")
        await stage.ask(400)
        before = await stage.metrics()

        async def request(number: int) -> tuple[str, float]:
            await stage.ask(400)
            return REQUESTS, before[REQUESTS] + 1 + number

        async def link(number: int) -> tuple[str, float]:
            stage.link = replace(BUSY, bytes_per_second=1e6 * (number + 1))
            return GOODPUT, 1e6 * (number + 1)

        async def load(number: int) -> tuple[str, float]:
            stage.num_running = 100 + number
            return RUNNING, stage.num_running

        async def block(number: int) -> tuple[str, float]:
            stage.east.publish(stored(LAYOUT, chain_of(16, seed=1 + number), 16, state=False))
            return HELD, before[HELD] + 1 + number

        here = stage.window
        return [
            _row("a request: seconds from the manager's knowledge to the page", await _seconds(here, request)),
            _row("a link: seconds from its agent's knowledge to the page", await _seconds(here, link)),
            _row("an instance's load: seconds from its agent's knowledge to the page", await _seconds(here, load)),
            _row("a block: seconds from its agent's knowledge to the page", await _seconds(here, block)),
            _row("a link, on the page of another manager", await _seconds(elsewhere, link)),
        ]


def main() -> int:
    """0 when every bar holds, else 1."""
    with tempfile.TemporaryDirectory() as directory:
        rows = asyncio.run(measure(Path(directory)))
    for row in rows:
        print("holds " if row["holds"] else "MISSES", row["name"], row["figure"], row["bar"])
    machine = {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "python": platform.python_version()}
    RESULTS.write_text(json.dumps({"machine": machine, "updates": rows}, indent=1) + "\n")
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
