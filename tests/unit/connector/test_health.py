"""Health of an engine whose EngineCore is stopped or hangs."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from prfaas.connector.vllm import health
from prfaas.connector.vllm.health import CoreWatch, with_children
from tests.support.paused_process import paused

# Prints the pid of a child, and waits for the end of its own input.
PARENT = (
    "import subprocess, sys; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); "
    "sys.stdin.read(); child.kill()"
)


async def _answer() -> bool:
    return False


def _watch(process: int, ask: Callable[[], Awaitable[Any]] = _answer, *, step_seconds: float = 60.0) -> CoreWatch:
    return CoreWatch(lambda: with_children(process), ask, step_seconds=step_seconds)


@contextmanager
def _parent() -> Iterator[tuple[int, int]]:
    """Yield the pids of a process and its child."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        yield parent.pid, int(parent.stdout.readline())
        parent.communicate()


@pytest.mark.parametrize("index", [0, 1])
async def test_health_waits_while_a_process_of_the_core_is_stopped(index: int) -> None:
    with _parent() as pids:
        watch = _watch(pids[0])
        await watch.until_running()
        with paused(pids[index]):
            waiting = asyncio.create_task(watch.until_running())
            assert not (await asyncio.wait([waiting], timeout=3 * health.POLL_SECONDS))[0]
        await waiting


async def test_health_is_refused_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_WAIT_SECONDS", 0.3)
    with _parent() as (_, child), paused(child), pytest.raises(TimeoutError):
        await _watch(child).until_running()


async def test_health_waits_for_a_loop_that_answers_no_question_in_the_time_of_a_step() -> None:
    asked, answers = 0, asyncio.Event()

    async def ask() -> None:
        nonlocal asked
        asked += 1
        await answers.wait()

    watch = _watch(os.getpid(), ask, step_seconds=0.3)
    await watch.until_running()  # A step may be under way.
    await asyncio.sleep(0.4)
    waiting = asyncio.create_task(watch.until_running())
    assert not (await asyncio.wait([waiting], timeout=3 * health.POLL_SECONDS))[0] and asked == 1
    answers.set()
    await waiting
    assert asked == 2
    await watch.until_running()


async def test_a_core_that_has_ended_is_left_to_the_check_of_vllm() -> None:
    async def ask() -> None:
        raise ConnectionError

    with _parent() as (ended, _):
        watch = _watch(ended, ask)
    for _ in range(2):
        await watch.until_running()
