"""Tokenisation of later turns: only the new messages, if the engine's template allows it."""

from __future__ import annotations

import json
from typing import Any

from prfaas.router.openai.conversation import MIN_COMPARED
from tests.support.router import LONG, RunningRouter, running_router


async def _conversation(router: RunningRouter, num_turns: int) -> list[dict[str, Any]]:
    """Ask so many times; each question is longer than t with what was said before."""
    messages = [{"role": "user", "content": LONG * 4}]
    for turn in range(num_turns):
        if turn:
            messages += [{"role": "assistant", "content": "abc"}, {"role": "user", "content": f"and {turn}?"}]
        status, _, headers = await router.post({"messages": messages}, path="/v1/chat/completions")
        assert (status, headers["x-prfaas-route"]) == (200, "remote")
    return messages


def _tokens(messages: list[dict[str, Any]], *, adds: bool) -> list[int]:
    text = "".join(f"<{message['role']}>{message['content']}</>" for message in messages) + "<assistant>"
    return list((text if adds else json.dumps(messages)).encode())


async def test_only_new_messages_are_tokenised_after_equal_comparisons() -> None:
    async with running_router() as router:
        router.west.adds = True
        messages = await _conversation(router, MIN_COMPARED + 3)
        assert router.west.chats[-2:] == [3, 3]  # Stand-in, answer, and next question.
        assert max(router.west.chats) == 1 + 2 * MIN_COMPARED
        assert router.east.bodies[-1]["prompt"] == _tokens(messages, adds=True)[:-1]
        assert "prompt_token_ids" not in router.west.bodies[-1]["kv_transfer_params"]


async def test_template_that_is_not_additive_always_gets_the_whole() -> None:
    async with running_router() as router:
        messages = await _conversation(router, 4)
        assert router.west.chats[-1] == len(messages)
        assert router.east.bodies[-1]["prompt"] == _tokens(messages, adds=False)[:-1]


async def test_template_that_stops_being_additive_is_noticed() -> None:
    async with running_router() as router:
        router.west.adds = True
        await _conversation(router, MIN_COMPARED + 2)
        router.west.adds = False
        messages = await _conversation(router, 3)
        assert router.west.chats[-1] == len(messages)
        assert router.east.bodies[-1]["prompt"] == _tokens(messages, adds=False)[:-1]
