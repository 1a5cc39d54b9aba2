"""The executor's place at a real agent: what is kept and taken, and what must not be once decode has died."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from prfaas.colocate.front import Blocks
from tests.integration.colocate.pool_user import OTHERS, OURS, POISON, Executor, tokens_of
from tests.support.paused_process import paused
from tests.support.waiting import until
from tools.processes import Children
from tools.stack import AgentProcess, Stack


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    directory = tmp_path_factory.mktemp("agent")
    with Children(directory) as children:
        stack = Stack(children, directory)
        agent = stack.start_agent("west", pool_bytes="64MiB")
        stack.await_agent(agent)
        yield agent


@pytest_asyncio.fixture
async def executor(agent: AgentProcess) -> AsyncIterator[Executor]:
    executor = Executor(agent.socket)
    yield executor
    await executor.pool.close()


async def test_what_a_request_leaves_is_loaded_for_a_longer_prompt_byte_for_byte(executor: Executor) -> None:
    tokens = tokens_of(1)
    await executor.leave(1, tokens, OURS)
    kv, state = executor.content(OURS)
    assert await executor.begin(2, (*tokens, 9, 9)) == len(tokens)
    executor.poison(OTHERS)
    executor.pool.load(2, OTHERS)
    await until(lambda: 2 in executor.loaded, what="the load")
    assert executor.loaded[2] == len(tokens)
    found_kv, found_state = executor.content(OTHERS)
    assert torch.equal(found_kv, kv) and torch.equal(found_state, state)
    executor.pool.abandon(2)


async def test_the_state_of_another_length_is_of_no_use(executor: Executor) -> None:
    tokens = tokens_of(2)
    await executor.leave(1, tokens, OURS)
    assert await executor.begin(2, (*tokens[:48], 9, 9)) == 0
    executor.pool.abandon(2)


async def test_what_a_dead_decode_had_lent_is_not_kept(executor: Executor, agent: AgentProcess) -> None:
    """The agent is held, so that its slots come only after the death."""
    tokens = tokens_of(3)
    visit = await executor.pool.open(tokens, {})
    executor.pool.begin(1, visit)
    with paused(agent.child.process.pid):
        executor.pool.leave(1, tokens, OURS)
        await until(visit.params.done, what="its turn")
        executor.pool.decode_lost(lambda _: False)
        executor.poison(OURS)
    await executor.leave(3, tokens_of(8), OTHERS)  # Whole turns have passed.
    assert await executor.begin(2, (*tokens, 9)) == 0
    assert executor.freed == [3]
    executor.pool.abandon(2)


async def test_nothing_is_loaded_into_blocks_of_a_dead_decode(executor: Executor) -> None:
    tokens = tokens_of(4)
    await executor.leave(1, tokens, OURS)
    assert await executor.begin(2, (*tokens, 9)) == len(tokens)
    executor.poison(OTHERS)
    executor.pool.load(2, OTHERS)
    executor.pool.decode_lost(lambda _: True)
    await executor.leave(3, tokens_of(5), OURS)  # Whole turns have passed.
    assert (executor.content(OTHERS)[0] == POISON).all() and executor.loaded == {}
    executor.pool.abandon(2)


async def test_a_request_whose_client_goes_while_its_prefix_is_loaded_still_gives_its_blocks_back(
    executor: Executor,
) -> None:
    tokens = tokens_of(6)
    await executor.leave(1, tokens, OURS)
    assert await executor.begin(2, (*tokens, 9)) == len(tokens)
    executor.pool.load(2, OTHERS)
    executor.pool.abandon(2)
    await until(lambda: 2 in executor.loaded, what="the answer")


async def test_an_agent_that_dies_costs_what_it_had_offered_and_nothing_waits(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        stack = Stack(children, tmp_path)
        mortal = stack.start_agent("mortal", pool_bytes="64MiB")
        stack.await_agent(mortal)
        executor = Executor(mortal.socket)
        tokens = tokens_of(7)
        await executor.leave(1, tokens, OURS)
        assert await executor.begin(2, (*tokens, 9)) == len(tokens), "offered, and no blocks are free yet"
        mortal.child.process.kill()
        mortal.child.process.wait()
        assert await executor.begin(3, (*tokens, 9)) == 0
        executor.pool.load(2, OTHERS)
        await until(lambda: executor.loaded == {2: 0}, what="the answer that nothing is loaded")
        executor.pool.leave(3, (*tokens, 9), OURS)
        await until(lambda: 3 in executor.freed, what="free blocks")
        await executor.pool.close()


async def test_a_turn_that_fails_is_told_once_and_does_not_leave_the_executor_waiting(executor: Executor) -> None:
    await executor.begin(1, tokens_of(9))
    executor.pool.leave(1, tokens_of(9), Blocks(3, (999, 1000, 1001, 1002)))  # These blocks do not exist.
    await until(lambda: executor.num_failures == 1, what="the word of it")
