"""The control loop before paced engines: what a change of roles brings, and what a link that is cut costs local requests."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.manager.state.traffic import MIN_WINDOW_SECONDS
from tests.integration.control import shifted_mix
from tests.support.process_deployment import (
    MODEL,
    Outcome,
    ProcessDeployment,
    ask,
    client,
    fresh_prompt,
    running_deployment,
)
from tests.support.waiting import until
from tools.demo.client import get_text
from tools.link import LinkShape

STATE_SECONDS = 120.0
STEADY_SECONDS = 20.0
NUM_CUTS, CALM_SECONDS, CUT_SECONDS = 3, 15.0, 40.0
NUM_CLIENTS = 24  # Twice as many as three decode instances answer at once.
T = 500
SHORT_TOKENS, LONG_TOKENS = 64, 2 * T
SHORT_SECONDS, LONG_SECONDS = 0.1, 0.5  # Time between arrivals. Long prompts then make 4 MB of KV per second.
WIDE, NARROW = LinkShape(bytes_per_second=12e6), LinkShape(bytes_per_second=1.2e6)
ENGINE = ("--prefill-seconds", "0.02", "--prefill-seconds-per-token", "4e-5", "--token-seconds", "0.005")


def measure() -> list[dict[str, Any]]:
    """Rows for both."""
    with tempfile.TemporaryDirectory() as directory:
        rows = asyncio.run(_role_change(Path(directory)))
    with tempfile.TemporaryDirectory() as directory:
        return rows + asyncio.run(_cut(Path(directory)))


async def _role_change(directory: Path) -> list[dict[str, Any]]:
    """Answers a second once an instance has turned, over what the plan says that the new split sustains."""
    ratios, started = list[float](), time.monotonic()
    with shifted_mix.running_cluster(directory, role_changes="apply") as site:
        await _seconds_until(lambda: bool(shifted_mix.plan_of(site)), "the first plan")
        first = time.monotonic() - started
        async with shifted_mix.load(site, num_clients=NUM_CLIENTS) as outcomes:
            await _seconds_until(lambda: shifted_mix.num_changes(site, "done") == 1, "an instance has turned")
            await asyncio.sleep(MIN_WINDOW_SECONDS)
            for _ in range(3):
                before = len(outcomes)
                await asyncio.sleep(STEADY_SECONDS)
                rate = (len(outcomes) - before) / STEADY_SECONDS
                ratios.append(rate / shifted_mix.plan_of(site)["requests_per_second"])
        failed = sum(not outcome.is_whole for outcome in outcomes)
    spread = _spread(ratios)
    holds = abs(spread["median"] - 1) <= 0.05 and not failed
    name = f"after a change of roles: throughput over the plan's; {failed} of {len(outcomes)} requests failed"
    return [
        _row(
            "a fresh deployment: seconds from its start until it has a t", _spread([first]), "<= 60", holds=first <= 60
        ),
        _row(name, spread, "within 5 %, none failed", holds=holds),
    ]


@dataclass
class _Traffic:
    """Short and long requests, arriving whatever became of those before."""

    short_ttfts: list[float] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)


async def _cut(directory: Path) -> list[dict[str, Any]]:
    """Return the link is cut to a tenth for `CUT_SECONDS` under load, `NUM_CUTS` times."""
    rises, returns, ratios, changes = [], [], [], []
    with running_deployment(directory, num_engines=1, shape=WIDE, engine_flags=ENGINE, threshold_tokens=T) as site:
        async with _load(site) as traffic:
            await asyncio.sleep(CALM_SECONDS)
            for _ in range(NUM_CUTS):
                await _seconds_until(lambda: _multiplier(site) == 1, "t is as configured")
                calm, before = await _median_of_next(traffic, CALM_SECONDS), _num_changes(site)
                site.relays["west"].reshape(NARROW)
                rises.append(await _seconds_until(lambda: _multiplier(site) > 1, "t has risen"))
                ratios.append(await _median_of_next(traffic, CUT_SECONDS - rises[-1]) / calm)
                site.relays["west"].reshape(WIDE)
                returns.append(await _seconds_until(lambda: _multiplier(site) == 1, "t is back"))
                changes.append(_num_changes(site) - before)
    failed = sum(not outcome.is_whole for outcome in traffic.outcomes)
    return [
        _row("a link cut to a tenth: seconds until t rises", _spread(rises), "<= 5", holds=max(rises) <= 5),
        _row("a link that is back: seconds until t is too", _spread(returns), "<= 60", holds=max(returns) <= 60),
        _row("a link cut to a tenth and back: times that t changes", _spread(changes), "<= 4", holds=max(changes) <= 4),
        _row(
            "a link cut to a tenth: median TTFT of local requests over before",
            _spread(ratios),
            "<= 1.2",
            holds=max(ratios) <= 1.2,
        ),
        _row(
            f"a link cut to a tenth {NUM_CUTS} times: failed requests of {len(traffic.outcomes)}",
            {"median": failed, "min": failed, "max": failed},
            "0",
            holds=not failed,
        ),
    ]


@contextlib.asynccontextmanager
async def _load(site: ProcessDeployment) -> AsyncIterator[_Traffic]:
    traffic = _Traffic()
    async with client() as session, asyncio.TaskGroup() as tasks:

        async def long() -> None:
            traffic.outcomes.append(await ask(session, site.router_url, fresh_prompt(LONG_TOKENS)))

        async def short() -> None:
            traffic.short_ttfts.append(await _ttft(session, site.router_url))

        async def arrive(send: Callable[[], Any], seconds: float) -> None:
            while True:
                tasks.create_task(send())
                await asyncio.sleep(seconds)

        arriving = [tasks.create_task(arrive(long, LONG_SECONDS)), tasks.create_task(arrive(short, SHORT_SECONDS))]
        yield traffic
        for task in arriving:
            task.cancel()


async def _ttft(session: aiohttp.ClientSession, url: str) -> float:
    body = {"model": MODEL, "prompt": fresh_prompt(SHORT_TOKENS), "max_tokens": 2, "stream": True}
    started = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        await response.content.readany()
        took = time.perf_counter() - started
        await response.read()
    return took


async def _median_of_next(traffic: _Traffic, seconds: float) -> float:
    start = len(traffic.short_ttfts)
    await asyncio.sleep(seconds)
    return statistics.median(traffic.short_ttfts[start:])


async def _seconds_until(holds: Callable[[], bool], what: str) -> float:
    started = time.monotonic()
    await until(holds, seconds=STATE_SECONDS, what=what)
    return time.monotonic() - started


def _multiplier(site: ProcessDeployment) -> float:
    """Return the multiplier of t on the path from east to west."""
    for line in get_text(f"{site.manager_url}/metrics").splitlines():
        if line.startswith("prfaas_manager_path_threshold_multiplier") and 'source="east"' in line:
            return float(line.rpartition(" ")[2])
    return 1.0


def _num_changes(site: ProcessDeployment) -> int:
    return site.manager.log.read_text().count("threshold.multiplier_changed")


def _row(name: str, figure: dict[str, float], bar: str, *, holds: bool) -> dict[str, Any]:
    return {"name": name, "figure": figure, "bar": bar, "holds": holds}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}
