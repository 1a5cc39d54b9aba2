"""Health of an engine that is honest about its EngineCore, the process that computes.

vLLM's `/health` answers while EngineCore is stopped or hangs. Here it stays unanswered meanwhile, as if the whole engine
were frozen, so routers and agents treat it as a silent engine.
"""

import asyncio
import contextlib
import functools
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.1
MAX_WAIT_SECONDS = 10.0  # Afterwards `/health` answers 503, so that unanswered questions do not pile up.
_STOPPED = ("T", "t")  # States of a process, by a signal and by a debugger.


def is_stopped(process: int) -> bool:
    """Return whether a process exists and is stopped."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:  # It has ended.
        return False
    return status.rpartition(")")[2].split()[0] in _STOPPED


def with_children(process: int) -> Iterator[int]:
    """Yield a process and the children of its main thread, such as the workers of an EngineCore."""
    yield process
    with contextlib.suppress(OSError):  # It has ended, or the kernel does not list children.
        yield from map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())


class CoreWatch:
    """Watch over an EngineCore: the state of its processes, and questions that its loop answers between two steps."""

    def __init__(
        self, processes: Callable[[], Iterator[int]], ask: Callable[[], Awaitable[Any]], *, step_seconds: float
    ) -> None:
        """`step_seconds` is the longest step. A long prefill or a compilation is shorter, so it is no hang."""
        self._processes = processes
        self._ask = ask
        self._step_seconds = step_seconds
        self._question: asyncio.Future[Any] | None = None
        self._asked_at = 0.0  # Monotonic time of the question.

    async def until_running(self) -> None:
        """Wait while EngineCore is stopped or hangs.

        Raises:
            TimeoutError: It did so for MAX_WAIT_SECONDS.
        """
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            while True:
                if not (self._is_stuck() or any(map(is_stopped, self._processes()))):
                    return
                await asyncio.sleep(POLL_SECONDS)

    def _is_stuck(self) -> bool:
        """Return whether a question is too old. Asks the next one when the last one is answered."""
        if self._question is None or self._question.done():
            # An EngineCore that has ended answers by an exception, of which vLLM's own check tells.
            self._question = asyncio.gather(self._ask(), return_exceptions=True)
            self._asked_at = time.monotonic()
        return time.monotonic() - self._asked_at > self._step_seconds


def watch_engine_core() -> None:
    """Have the `check_health` of vLLM's API server wait for EngineCore. A second call has no effect."""
    from vllm import envs  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415
    from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

    original = AsyncLLM.check_health
    if hasattr(original, "__wrapped__"):
        return
    watches: weakref.WeakKeyDictionary[Any, CoreWatch] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    async def check_health(engine: Any) -> None:
        await original(engine)
        if engine not in watches:
            step_seconds = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS  # vLLM ends workers whose step lasts longer.
            processes = functools.partial(_processes, engine)
            watches[engine] = CoreWatch(processes, engine.is_paused, step_seconds=step_seconds)
        try:
            await watches[engine].until_running()
        except TimeoutError as error:
            raise EngineDeadError from error

    AsyncLLM.check_health = check_health


def _processes(engine: Any) -> Iterator[int]:
    """Yield the processes of an AsyncLLM's EngineCores; none if another process has started them."""
    manager = getattr(engine.engine_core.resources, "engine_manager", None)
    for core in getattr(manager, "processes", ()):
        yield from with_children(core.pid)
