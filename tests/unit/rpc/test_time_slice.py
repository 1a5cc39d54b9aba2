"""Long work on the event loop yields to other tasks after each time slice."""

import asyncio

from prfaas.rpc.tasks import TimeSlice


async def test_other_tasks_run_between_two_slices() -> None:
    ran: list[int] = []
    time_slice = TimeSlice()
    for number in range(3):
        asyncio.get_running_loop().call_soon(ran.append, number)
        while not time_slice.is_over:
            pass
        assert len(ran) == number
        await time_slice.yield_if_over()
        assert len(ran) == number + 1
