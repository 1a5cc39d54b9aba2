"""A request that holds engine blocks before its KV comes, when no KV comes: under each of vLLM's policies for failed loads."""

from __future__ import annotations

import time

import pytest

from tests.e2e.pair import ADMISSIONS, CHUNK_TOKENS, LOAD_FAILURE_POLICIES, Pair, counts, outcome, random_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
LENGTH = 3 * CHUNK_TOKENS + 1


def _expiring_grant(pair: Pair, prompt: list[int]) -> str:
    return pair.grant(prompt, expires_at=time.time() + 2.5)


@pytest.mark.parametrize("pair", ["nemotron_h"], indirect=True)
def test_recompute_computes_the_prompt_here(pair: Pair) -> None:
    assert ADMISSIONS[pair.family] == "preallocate"
    prompt = random_prompt(LENGTH, seed=61)
    assert pair.decode_leg(prompt, _expiring_grant(pair, prompt)) == pair.alone(prompt)
    assert counts(pair.decode)[outcome("receive", "deadline")] == 1


@pytest.mark.parametrize("pair", ["gpt_oss"], indirect=True)
def test_fail_ends_the_request_with_an_error(pair: Pair) -> None:
    assert (ADMISSIONS[pair.family], LOAD_FAILURE_POLICIES[pair.family]) == ("preallocate", "fail")
    prompt = random_prompt(LENGTH, seed=62)
    with pytest.raises(RuntimeError):
        pair.decode_leg(prompt, _expiring_grant(pair, prompt))
    assert counts(pair.decode)[outcome("receive", "deadline")] == 1
    assert pair.through_both(prompt) == pair.alone(prompt)
