"""vLLM's own ways to forget what former weights computed, against a pool that holds it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable

import pytest

from tests.e2e.pair import CHUNK_TOKENS, Pair, counts, outcome, random_prompt
from tests.support.waiting import wait_until
from tools.demo.client import prefilled_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.parametrize("pair", ["llama"], indirect=True)]
LENGTH = 4 * CHUNK_TOKENS + 1


def _post(pair: Pair, path: str) -> dict[str, object]:
    request = urllib.request.Request(f"{pair.decode.url}{path}", method="POST")
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, object] = json.load(response)
        return answer


def _reset(pair: Pair) -> None:
    path = "/reset_prefix_cache?reset_external=true"
    wait_until(lambda: _post(pair, path)["success"], what="an engine that holds no blocks")


def _pause(pair: Pair) -> None:
    _post(pair, "/pause?clear_cache=true")
    _post(pair, "/resume")


@pytest.mark.parametrize("forget", [_reset, _pause])
def test_what_was_computed_before_is_computed_anew(pair: Pair, forget: Callable[[Pair], None]) -> None:
    prompt = random_prompt(LENGTH, seed=71)
    wanted = pair.alone(prompt)

    def num_computed() -> int:
        """Tokens of the prompt that the engine computes when it is asked, and has left in the pool afterwards."""
        before, stored = prefilled_tokens(pair.decode.url), _num_stored(pair)
        assert pair.locally(prompt) == wanted
        wait_until(lambda: _num_stored(pair) > stored, what="the blocks in the pool")
        return prefilled_tokens(pair.decode.url) - before

    _reset(pair)  # which waits for what that has left
    assert [num_computed(), num_computed()] == [LENGTH, 1]
    forget(pair)
    assert num_computed() == LENGTH


def _num_stored(pair: Pair) -> float:
    return counts(pair.decode).get(outcome("store", "completed"), 0)
