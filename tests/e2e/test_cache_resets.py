"""vLLM's resets of its caches for new weights also clear the pool."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable

import pytest

from tests.support.engine_deployment import CHUNK_TOKENS, random_prompt
from tests.support.engine_pair import EnginePair, num_outcomes
from tests.support.waiting import wait_until
from tools.demo.client import prefilled_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.parametrize("pair", ["llama"], indirect=True)]
LENGTH = 4 * CHUNK_TOKENS + 1


def _post(pair: EnginePair, path: str) -> dict[str, object]:
    request = urllib.request.Request(f"{pair.decode.url}{path}", method="POST")
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, object] = json.load(response)
        return answer


def _reset(pair: EnginePair) -> None:
    path = "/reset_prefix_cache?reset_external=true"
    wait_until(lambda: _post(pair, path)["success"], what="an engine that holds no blocks")


def _pause(pair: EnginePair) -> None:
    _post(pair, "/pause?clear_cache=true")
    _post(pair, "/resume")


@pytest.mark.parametrize("forget", [_reset, _pause])
def test_a_repeated_prompt_is_computed_again_after_a_reset(
    pair: EnginePair, forget: Callable[[EnginePair], None]
) -> None:
    prompt = random_prompt(LENGTH, seed=71)
    expected = pair.alone(prompt)

    def num_computed() -> int:
        """Return how many tokens the engine computes for the prompt; wait until the pool has its blocks."""
        before, stored = prefilled_tokens(pair.decode.url), num_outcomes(pair.decode, "store", "completed")
        assert pair.locally(prompt) == expected
        wait_until(lambda: num_outcomes(pair.decode, "store", "completed") > stored, what="the blocks in the pool")
        return prefilled_tokens(pair.decode.url) - before

    _reset(pair)
    assert [num_computed(), num_computed()] == [LENGTH, 1]
    forget(pair)
    assert num_computed() == LENGTH
