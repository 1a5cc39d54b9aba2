"""The executor under the requests: a closed loop, a long prompt into a full batch, and the deaths of its sides."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from benchmarks.colocate.long_prompt import long_figures
from benchmarks.colocate.setting import Setting
from benchmarks.colocate.workload import Figures, Workload
from prfaas.colocate.processes.shared_memory import Side
from prfaas.colocate.processes.supervisor import ExecutorSettings, Supervisor
from prfaas.model.cost.colocation import Colocation
from tests.support.waiting import until


def settings_of(setting: Setting, shared: Colocation | None, itl_slo_seconds: float) -> ExecutorSettings:
    """Return settings in which shares adapt, or without a profile, both sides use all cores."""
    return ExecutorSettings(
        shape=setting.shape,
        cache=setting.cache,
        max_rows=setting.workload.concurrency,
        max_tokens=setting.max_tokens,
        dtype=setting.dtype,
        partition=setting.partition if shared else "none",
        profile=shared.decode if shared else None,
        itl_slo_seconds=itl_slo_seconds,
        num_threads=setting.num_threads,
        max_deaths=100,
    )


async def run(executor: Supervisor, setting: Setting) -> dict[str, object]:
    """Return the workload, then one long prompt into a full batch."""
    result: dict[str, object] = dict(await _drive(executor, setting.workload))
    result["long_prefill"] = await _long_prefill(executor, setting)
    return result


async def warm_up(executor: Supervisor, setting: Setting) -> None:
    number = setting.workload.concurrency
    await _drive(executor, Workload(number, number, 64, 8))


async def seconds_after_death(executor: Supervisor, side: Side) -> float:
    """From the kill of a side to the first token that needed its successor."""
    tokens = executor.generate(tuple(range(64)), 200)
    await anext(tokens)
    started = time.perf_counter()
    os.kill(executor.status()["pids"][side], signal.SIGKILL)  # type: ignore[index]
    restarts = executor.num_restarts[side]
    await until(lambda: executor.num_restarts[side] > restarts, what="the restart")
    if side == "prefill":
        await tokens.aclose()
        tokens = executor.generate(tuple(range(64)), 1)
    await anext(tokens)
    seconds = time.perf_counter() - started
    await tokens.aclose()
    return seconds


async def _drive(executor: Supervisor, workload: Workload) -> dict[str, float]:
    figures, requests = Figures(), iter(range(workload.num_requests))

    async def client() -> None:
        for request in requests:
            figures.start(request, time.perf_counter())
            async for _ in executor.generate(workload.prompt(request), workload.answer_tokens):
                figures.arrivals[request].append(time.perf_counter())

    await asyncio.gather(*(client() for _ in range(workload.concurrency)))
    return figures.summary(answer_tokens=workload.answer_tokens)


async def _long_prefill(executor: Supervisor, setting: Setting) -> dict[str, float]:
    """ITL of a batch of short requests while one long prompt is prefilled, and how long that took."""
    rows, gaps, running = setting.workload.concurrency - 1, [], asyncio.Event()
    ended = asyncio.Event()

    async def decoder(number: int) -> None:
        last = None
        async for _ in executor.generate(setting.workload.prompt(number)[:128], setting.max_tokens - 192):
            now = time.perf_counter()
            if last is not None and running.is_set():
                gaps.append(now - last)
            last = now
            if ended.is_set():
                return

    decoders = [asyncio.ensure_future(decoder(number)) for number in range(rows)]
    await until(lambda: executor.status()["decode_batch"] == rows, seconds=300, what="a full batch")
    started = time.perf_counter()
    running.set()
    prompt = tuple(i % 256 for i in range(setting.long_prompt_tokens))
    async for _ in executor.generate(prompt, 1):
        seconds = time.perf_counter() - started
    running.clear()
    ended.set()
    await asyncio.gather(*decoders)
    return long_figures(gaps, seconds, setting)
