"""An engine that restarts beside its living agent reuses the KV in the pool."""

from __future__ import annotations

import pytest

from tests.support.engine_deployment import random_prompt
from tests.support.engine_pair import EnginePair
from tools.demo.client import prefilled_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.parametrize("pair", ["granite4h"], indirect=True)]
PROMPT_TOKENS = 4097  # Whole chunks and one token: one engine alone splits the prompt like the two.


def test_a_killed_engine_serves_a_repeated_prompt_from_the_pool(pair: EnginePair) -> None:
    prompt = random_prompt(PROMPT_TOKENS, seed=61)
    expected = pair.alone(prompt)
    assert pair.through_both(prompt) == expected
    pair.kill_engine("west")
    pair.await_engine("west")
    assert pair.locally(prompt) == expected
    assert prefilled_tokens(pair.decode.url) == 1, "the pool holds the state after all tokens but the last"
