"""Bounds on the bytes that are tokenised at once."""

import asyncio

from prfaas.router.openai.tokenizer import ByteGate


async def _pass(gate: ByteGate, num_bytes: int, opened: asyncio.Event, passed: list[int]) -> None:
    async with gate.passing(num_bytes):
        passed.append(num_bytes)
        await opened.wait()


async def test_prompts_wait_while_their_bytes_exceed_the_limit() -> None:
    gate, opened, passed = ByteGate(100), asyncio.Event(), list[int]()
    tasks = [asyncio.create_task(_pass(gate, num_bytes, opened, passed)) for num_bytes in (60, 50, 40)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert passed == [60, 40]
    opened.set()
    await asyncio.gather(*tasks)
    assert passed == [60, 40, 50]


async def test_cancelled_prompt_gives_its_room_back() -> None:
    gate, never, passed = ByteGate(100), asyncio.Event(), list[int]()
    waiting = asyncio.create_task(_pass(gate, 100, never, passed))
    for _ in range(5):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,))
    async with asyncio.timeout(1), gate.passing(100):
        assert passed == [100]
