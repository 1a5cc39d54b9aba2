"""Calls that wait for the loop leave it to others in between."""

from __future__ import annotations

import asyncio

from prfaas.agent.engine.server import OneATurn


async def test_between_two_calls_the_loop_has_a_turn() -> None:
    seen: list[object] = []
    call = OneATurn(seen.append)
    for number in range(3):
        call(number)
    assert not seen
    for _ in range(4):
        await asyncio.sleep(0)
        seen.append("turn")
    assert seen == [0, "turn", 1, "turn", 2, "turn", "turn"]


async def test_a_call_that_fails_holds_up_no_other() -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context["exception"]))
    seen: list[int] = []

    def take(number: int) -> None:
        seen.append(10 // number)

    call = OneATurn(take)
    for number in (0, 5):
        call(number)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert seen == [2] and [type(failure) for failure in failures] == [ZeroDivisionError]
