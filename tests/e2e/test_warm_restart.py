"""An engine that starts again beside its living agent takes up what the pool kept: prefixes, and states at their length."""

from __future__ import annotations

import pytest

from tests.e2e.pair import Pair, random_prompt
from tools.demo.client import prefilled_tokens

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("pair", ["granite4h"], indirect=True),
]
PROMPT_TOKENS = 4097  # whole chunks and one token: one engine alone splits it alike


def test_a_killed_engine_serves_a_repeated_prompt_from_the_pool(pair: Pair) -> None:
    prompt = random_prompt(PROMPT_TOKENS, seed=61)
    wanted = pair.alone(prompt)
    assert pair.through_both(prompt) == wanted
    pair.restart_decode()
    assert pair.locally(prompt) == wanted
    assert prefilled_tokens(pair.decode.url) == 1, "the pool holds the state after all tokens but the last"
