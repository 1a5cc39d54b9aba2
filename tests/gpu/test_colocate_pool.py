"""The executor's blocks on an NVIDIA GPU go to the agent's pool and come back. Without a GPU it is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.colocate.pool_user import OTHERS, OURS, Executor, tokens_of
from tests.support.waiting import until
from tools.processes import Children
from tools.stack import Stack

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


async def test_what_a_request_leaves_is_loaded_for_a_longer_prompt_byte_for_byte(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        stack = Stack(children, tmp_path)
        agent = stack.start_agent("west", pool_bytes="64MiB")
        stack.await_agent(agent)
        executor = Executor(agent.socket, device="cuda")
        tokens = tokens_of(1)
        await executor.leave(1, tokens, OURS)
        kv, state = executor.content(OURS)
        assert await executor.begin(2, (*tokens, 9, 9)) == len(tokens)
        executor.poison(OTHERS)
        executor.pool.load(2, OTHERS)
        await until(lambda: 2 in executor.loaded, what="the load")
        found_kv, found_state = executor.content(OTHERS)
        assert torch.equal(found_kv, kv) and torch.equal(found_state, state)
        executor.pool.abandon(2)
        await executor.pool.close()
