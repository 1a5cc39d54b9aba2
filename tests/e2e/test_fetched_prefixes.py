"""A second turn on another node: the prefix comes over the wire, and the engine computes only the new tokens.

Answers of one engine alone are asked turn by turn under a salt of their own. It then splits the prompts like engines that
reuse a prefix, so tokens are equal in bfloat16 too.
"""

import os
from typing import Any

import pytest

from tests.support.engine_deployment import CHUNK_TOKENS, random_prompt
from tests.support.engine_pair import ACROSS_CLUSTERS, EXACT, FURTHER, EnginePair, held_bytes, resumes_at
from tests.support.waiting import wait_until
from tools.demo.client import prefilled_tokens

FAMILIES = [
    "granite4h",
    *(pytest.param(family, marks=pytest.mark.soak) for family in ("llama", "gemma3", "qwen3_next")),
]
FAMILIES += [pytest.param(family, marks=pytest.mark.soak) for family in FURTHER]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.parametrize("pair", FAMILIES, indirect=True)]
QUESTION_TOKENS = 505  # With its answer more than four blocks: every window that a fifth block needs is whole.


@pytest.fixture(scope="module")
def deployment(pair: EnginePair) -> EnginePair:
    manager = {"threshold_tokens": 256, "bandwidth": "abundant", "fetch_tokens": 128}
    pair.configure(ACROSS_CLUSTERS, manager=manager, silence_seconds="3s")
    return pair


def _first_turn_at(deployment: EnginePair, name: str, question: list[int], **fields: Any) -> tuple[list[int], int]:
    """Ask a question; return the turn and how much of it the node then holds."""
    before = deployment.num_reports(name)
    answer = deployment.ask(deployment.engines[name].url, question, **fields)
    wait_until(lambda: deployment.num_reports(name) > before, what="the blocks")
    wait_until(deployment.has_healed, what="an index that knows the blocks")
    turn = [*question, *answer.token_ids]
    return turn, resumes_at(deployment.layout(), len(turn) - 1)  # The last token is never computed.


def _prefilled(deployment: EnginePair) -> dict[str, int]:
    return {name: prefilled_tokens(engine.url) for name, engine in deployment.engines.items()}


def _alone(deployment: EnginePair, question: list[int], prompt: list[int]) -> tuple[int, ...]:
    """Return what one engine alone answers in the second turn."""
    salt = os.urandom(8).hex()
    _first_turn_at(deployment, "west", question, cache_salt=salt)
    answer = deployment.ask(deployment.decode.url, prompt, cache_salt=salt).token_ids
    if deployment.family in EXACT:
        assert answer == deployment.reference(prompt)
    return answer


def test_a_prefix_in_the_prfaas_cluster_is_fetched_and_the_pd_cluster_computes_the_rest(deployment: EnginePair) -> None:
    question = random_prompt(QUESTION_TOKENS, seed=1)
    turn, held = _first_turn_at(deployment, "east", question)
    num_arrived, computed = len(deployment.inbound_transfers("west")), _prefilled(deployment)
    prompt = turn + random_prompt(100, seed=2)
    answer = deployment.ask(deployment.router_url, prompt)
    assert (answer.headers["x-prfaas-route"], answer.headers["x-prfaas-reason"]) == ("local", "fetched")
    assert answer.headers["x-prfaas-cached-tokens"] == str(held)
    expected = {"east": computed["east"], "west": computed["west"] + len(prompt) - held}
    wait_until(lambda: _prefilled(deployment) == expected, what="the count of computed tokens")
    (copy,) = deployment.inbound_transfers("west")[num_arrived:]
    assert (copy["outcome"], copy["num_tokens"], copy["held_bytes"]) == ("completed", held, 0)
    assert copy["payload_bytes"] <= copy["wire_bytes"] <= copy["payload_bytes"] * 1.01 + 1000
    assert answer.token_ids == _alone(deployment, question, prompt)


def test_a_prefix_in_the_pd_cluster_travels_to_the_prefill_and_only_the_new_part_returns(
    deployment: EnginePair,
) -> None:
    question = random_prompt(QUESTION_TOKENS, seed=3)
    turn, held = _first_turn_at(deployment, "west", question)
    num_arrived = {name: len(deployment.inbound_transfers(name)) for name in ("east", "west")}
    computed = _prefilled(deployment)
    prompt = turn + random_prompt(2 * CHUNK_TOKENS, seed=4)
    answer = deployment.ask(deployment.router_url, prompt)
    assert (answer.headers["x-prfaas-route"], answer.headers["x-prfaas-reason"]) == ("remote", "long")
    assert answer.headers["x-prfaas-cached-tokens"] == str(held)
    expected = {"east": computed["east"] + len(prompt) - 1 - held, "west": computed["west"] + 1}
    wait_until(lambda: _prefilled(deployment) == expected, what="the count of computed tokens")
    (there,) = deployment.inbound_transfers("east")[num_arrived["east"] :]
    (back,) = deployment.inbound_transfers("west")[num_arrived["west"] :]
    assert (there["outcome"], there["num_tokens"], there["held_bytes"]) == ("completed", held, 0)
    assert (back["outcome"], back["num_tokens"]) == ("completed", len(prompt) - 1)
    assert back["held_bytes"] == held_bytes(deployment.layout(), held, len(prompt) - 1), "full blocks of the prefix"
    missing = back["payload_bytes"] - back["held_bytes"]
    assert missing <= back["wire_bytes"] <= missing * 1.01 + 1000
    assert answer.token_ids == _alone(deployment, question, prompt)
