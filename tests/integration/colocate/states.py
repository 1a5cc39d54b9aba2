"""Holds the executor in each state of a request: sides are stopped by signal, so that a death can come exactly there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from prfaas.colocate.processes.shared_memory import Side, Word
from prfaas.colocate.processes.supervisor import Supervisor
from tests.support import paused_process
from tests.support.waiting import until

Request = tuple[tuple[int, ...], int]
Answers = asyncio.Task[list[list[int]]]


def pid_of(executor: Supervisor, side: str) -> int:
    return executor.status()["pids"][side]  # type: ignore[index,no-any-return]


class Hold:
    """Stops sides; what lives on leaving goes on."""

    def __init__(self, executor: Supervisor) -> None:
        self._executor = executor
        self._stopped: dict[str, int] = {}

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        for side in list(self._stopped):
            self.resume(side)

    def stop(self, side: Side) -> None:
        """Return once the side stands still."""
        pid = self._stopped[side] = pid_of(self._executor, side)
        paused_process.stop(pid)

    def resume(self, side: str) -> None:
        paused_process.resume(self._stopped.pop(side))


def ask(executor: Supervisor, requests: Sequence[Request]) -> Answers:
    """Return the requests, all at once."""

    async def answer(request: Request) -> list[int]:
        return [token async for token in executor.generate(*request)]

    async def every() -> list[list[int]]:
        return await asyncio.gather(*map(answer, requests))

    return asyncio.ensure_future(every())


async def pending_kv(executor: Supervisor, hold: Hold, requests: Sequence[Request]) -> Answers:
    """Decode, which alone gives out blocks, stands still before the requests come."""
    hold.stop("decode")
    answers = ask(executor, requests)
    await until(lambda: executor.status()["live_requests"] == len(requests), what="live requests")
    return answers


async def waiting_prefill(executor: Supervisor, hold: Hold, requests: Sequence[Request]) -> Answers:
    """Prefill stands still; decode has given blocks to every request."""
    hold.stop("prefill")
    answers = ask(executor, requests)
    await until(lambda: executor.board[Word.WAITING_PREFILL] == len(requests), seconds=120, what="blocks for all")
    return answers


async def prefill_finished(executor: Supervisor, hold: Hold, requests: Sequence[Request]) -> Answers:
    """Return every prompt is computed; decode stands still and has not looked."""
    before = executor.board[Word.PREFILL_STEPS]
    answers = await waiting_prefill(executor, hold, requests)
    hold.stop("decode")
    hold.resume("prefill")
    computed = before + len(requests)
    await until(lambda: executor.board[Word.PREFILL_STEPS] == computed, seconds=120, what="all prompts computed")
    return answers


async def running(executor: Supervisor, hold: Hold, requests: Sequence[Request]) -> Answers:
    """Some request has a row of the batch and is not done; decode stands still between two steps or within one."""
    while True:
        answers = ask(executor, requests)
        await until(lambda: executor.board[Word.RUNNING] or answers.done(), seconds=120, what="a running request")  # noqa: B023
        hold.stop("decode")
        if executor.board[Word.RUNNING]:
            return answers
        hold.resume("decode")  # The cases were over already.
        await answers


STATES: dict[str, Callable[[Supervisor, Hold, Sequence[Request]], Awaitable[Answers]]] = {
    "pending_kv": pending_kv,
    "waiting_prefill": waiting_prefill,
    "prefill_finished": prefill_finished,
    "running": running,
}
