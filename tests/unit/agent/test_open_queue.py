"""Costly OPENs are read one per iteration of the event loop."""

from __future__ import annotations

import asyncio

from prfaas.agent.daemon import take_one_per_iteration


async def test_event_loop_iterates_between_two_queued_items() -> None:
    seen: list[object] = []
    queue: asyncio.Queue[int] = asyncio.Queue()
    for number in range(3):
        queue.put_nowait(number)
    task = asyncio.create_task(take_one_per_iteration(queue, seen.append))
    for _ in range(4):
        await asyncio.sleep(0)
        seen.append("iteration")
    task.cancel()
    assert seen == [0, "iteration", 1, "iteration", 2, "iteration", "iteration"]
