"""Two real processes over shared memory: the tokens of the sequential engine, whoever dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
import torch

from prfaas.colocate.model import cache, weights
from prfaas.colocate.model.cache import CacheShape
from prfaas.colocate.model.model import HybridModel
from prfaas.colocate.model.shape import TINY
from prfaas.colocate.processes.shared_memory import SIDES, Word
from prfaas.colocate.processes.supervisor import ExecutorSettings, Supervisor
from tests.integration.colocate.states import STATES, Hold, pid_of
from tests.support.sequential_generation import generate
from tests.support.waiting import until

# One executor for all tests: a start takes seconds, because both sides load torch.
pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

NUM_REQUESTS = 50
SETTINGS = ExecutorSettings(
    shape="tiny",
    cache=CacheShape(num_blocks=200, block_tokens=16, num_state_slots=33),
    max_rows=16,
    max_tokens=512,
    seed=3,
    dtype="float64",
    num_threads=1,
)
REQUESTS = [
    (tuple((5 * i + 11 * j + j * j) % 320 for j in range(5 + 37 * i % 190)), 1 + 7 * i % 40)
    for i in range(NUM_REQUESTS)
]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    torch.set_num_threads(1)
    flat = torch.empty(weights.num_elements(TINY), dtype=torch.float64)
    weights.fill(TINY, flat, SETTINGS.seed)
    kv = torch.zeros(cache.kv_elements(TINY, SETTINGS.cache), dtype=torch.float64)
    states = torch.zeros(cache.state_elements(TINY, SETTINGS.cache), dtype=torch.float64)
    view = cache.view(TINY, SETTINGS.cache, kv, states)
    model = HybridModel(TINY, weights.view(TINY, flat), view, max_tokens=SETTINGS.max_tokens)
    return [generate(model, prompt, max_tokens) for prompt, max_tokens in REQUESTS]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def executor() -> AsyncIterator[Supervisor]:
    async with Supervisor(replace(SETTINGS, max_deaths=1000)) as supervisor:
        yield supervisor


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def both_live(executor: Supervisor) -> None:
    await both_sides_live(executor)


async def both_sides_live(executor: Supervisor) -> None:
    """A restart is counted when it begins; the new process has its id later."""
    await until(lambda: executor.is_alive, what="both sides", seconds=150)


async def answer(executor: Supervisor, index: int) -> list[int]:
    prompt, max_tokens = REQUESTS[index]
    return [token async for token in executor.generate(prompt, max_tokens)]


async def everything_is_free(executor: Supervisor) -> None:
    blocks = SETTINGS.cache.num_blocks - 1
    await until(lambda: executor.board[Word.FREE_BLOCKS] == blocks, what="all blocks free", seconds=30)


async def test_fifty_concurrent_requests_get_exactly_the_sequential_tokens(
    executor: Supervisor, expected: list[list[int]]
) -> None:
    assert await asyncio.gather(*(answer(executor, i) for i in range(NUM_REQUESTS))) == expected
    await everything_is_free(executor)
    assert executor.num_restarts == {"prefill": 0, "decode": 0}


async def test_wherever_prefill_stands_still_decode_ends_its_answers(
    executor: Supervisor, expected: list[list[int]]
) -> None:
    """Nothing that prefill could hold at any moment keeps decode waiting."""
    prompt, max_tokens = REQUESTS[5]
    for _ in range(5):
        stream = executor.generate(prompt, max_tokens)
        tokens = [await anext(stream), await anext(stream)]  # The first token is from prefill, the second from decode.
        with Hold(executor) as hold:
            others = asyncio.gather(*(answer(executor, i) for i in range(10, 16)))
            hold.stop("prefill")  # Prefill stops at any point.
            assert tokens + [token async for token in stream] == expected[5]
        assert await others == expected[10:16]


async def dies_in_state(executor: Supervisor, expected: list[list[int]], state: str, side: str, *, seed: int) -> None:
    """Kill a side while six requests, drawn by the seed, are held in a state."""
    chosen = random.Random(f"{state} {side} {seed}").sample(range(NUM_REQUESTS), 6)
    restarts = executor.num_restarts[side]  # type: ignore[index]
    with Hold(executor) as hold:
        answers = await STATES[state](executor, hold, [REQUESTS[index] for index in chosen])
        os.kill(pid_of(executor, side), signal.SIGKILL)
    assert await answers == [expected[index] for index in chosen]
    await until(lambda: executor.num_restarts[side] == restarts + 1, what="the restart", seconds=60)  # type: ignore[index]
    await both_sides_live(executor)
    await everything_is_free(executor)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("state", STATES)
async def test_the_death_of_either_side_in_any_state_changes_no_token(
    executor: Supervisor, expected: list[list[int]], state: str, side: str
) -> None:
    await dies_in_state(executor, expected, state, side, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fifty", range(4))
async def test_two_hundred_deaths_in_states_drawn_by_chance_change_no_token(
    executor: Supervisor, expected: list[list[int]], fifty: int
) -> None:
    chance = random.Random(17 + fifty)
    for seed in range(50 * fifty, 50 * fifty + 50):
        await dies_in_state(executor, expected, chance.choice([*STATES]), chance.choice(SIDES), seed=seed)


async def test_without_its_nursery_the_executor_goes_on_and_still_survives_a_death(
    executor: Supervisor, expected: list[list[int]]
) -> None:
    forkserver = executor.status()["forkserver"]
    answers = asyncio.gather(*(answer(executor, i) for i in range(8)))
    os.kill(forkserver, signal.SIGKILL)  # type: ignore[arg-type]
    os.kill(pid_of(executor, "decode"), signal.SIGKILL)
    assert await answers == expected[:8]
    assert executor.status()["forkserver"] != forkserver


async def test_both_sides_killed_at_once_change_no_token(executor: Supervisor, expected: list[list[int]]) -> None:
    answers = asyncio.gather(*(answer(executor, i) for i in range(20)))
    await until(lambda: executor.board[Word.DECODE_BATCH] >= 2, seconds=150, what="a batch of two")
    for side in ("decode", "prefill"):
        os.kill(pid_of(executor, side), signal.SIGKILL)
    assert await answers == expected[:20]


async def test_an_answer_that_nobody_reads_any_more_frees_its_blocks(executor: Supervisor) -> None:
    prompt, _ = REQUESTS[7]
    stream = executor.generate(prompt, 400)
    assert isinstance(await anext(stream), int)
    await stream.aclose()
    await everything_is_free(executor)


async def test_a_request_that_can_never_fit_is_refused(executor: Supervisor) -> None:
    with pytest.raises(ValueError, match="more than this executor can hold"):
        await anext(executor.generate((1,) * 500, 100))
