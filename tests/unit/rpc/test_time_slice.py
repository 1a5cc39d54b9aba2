"""Work in slices: once one is over, others have their turn before it goes on."""

from __future__ import annotations

import asyncio

from prfaas.rpc.tasks import TimeSlice


async def test_others_run_between_two_slices() -> None:
    ran: list[int] = []
    turns = TimeSlice()
    for number in range(3):
        asyncio.get_running_loop().call_soon(ran.append, number)
        while not turns.is_over:
            pass
        assert len(ran) == number
        await turns.give_when_over()
        assert len(ran) == number + 1
