"""`make bench AREA=dashboard`: seconds until a real Chromium shows a change; writes benchmarks/results/dashboard.json."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.integration.dashboard.browser import chromium
from tests.integration.dashboard.test_page import BUSY, Stage
from tests.integration.manager.deployment import Deployment

RESULTS = Path(__file__).resolve().parent.parent / "results" / "dashboard.json"
NUM_CHANGES = 30
WARM_UP = 3
BAR_SECONDS = 2.0
REQUESTS = 'prfaas_manager_ttft_seconds_count{route="local"}'
GOODPUT = 'prfaas_manager_path_bytes_per_second{destination="west",source="east"}'
SHOWS = """([metric, value]) => [...document.querySelectorAll('[data-metric]')].some(
  its => its.dataset.metric === metric && Math.abs(Number(its.dataset.value) - value) < 1)"""


async def _seconds(stage: Stage, change: Callable[[int], Awaitable[tuple[str, float]]]) -> list[float]:
    """Of each change, until the page shows it; `change` returns which metric then has which value."""
    found = []
    for number in range(WARM_UP + NUM_CHANGES):
        await asyncio.sleep(random.random())  # at any moment between two of the feed's
        metric, value = await change(number)
        started = time.perf_counter()
        await stage.window.page.wait_for_function(SHOWS, arg=[metric, value], polling="raf")
        found.append(time.perf_counter() - started)
    return found[WARM_UP:]


def _row(name: str, seconds: list[float]) -> dict[str, Any]:
    figure = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    shown = {key: round(value, 3) for key, value in figure.items()}
    bar = f"every one of {NUM_CHANGES} within {BAR_SECONDS:g} s"
    return {"name": name, "figure": shown, "bar": bar, "holds": max(seconds) <= BAR_SECONDS}


async def measure(directory: Path) -> list[dict[str, Any]]:
    """A request that a router reports, and a link whose goodput an agent reports anew, each second at most."""
    async with AsyncExitStack() as stack:
        window = await (await stack.enter_async_context(chromium()))()
        stage = Stage(await stack.enter_async_context(Deployment(directory)), window)
        await stage.start()
        await stage.ask(400)
        before = (await stage.metrics())[REQUESTS]

        async def request(number: int) -> tuple[str, float]:
            await stage.ask(400)
            return REQUESTS, before + 1 + number

        async def link(number: int) -> tuple[str, float]:
            stage.link = replace(BUSY, bytes_per_second=1e6 * (number + 1))
            return GOODPUT, 1e6 * (number + 1)

        return [
            _row("a request: seconds from the manager's knowledge to the page", await _seconds(stage, request)),
            _row("a link: seconds from its agent's knowledge to the page", await _seconds(stage, link)),
        ]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        rows = asyncio.run(measure(Path(directory)))
    for row in rows:
        print("holds " if row["holds"] else "MISSES", row["name"], row["figure"], row["bar"])
    machine = {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "python": platform.python_version()}
    RESULTS.write_text(json.dumps({"machine": machine, "updates": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
