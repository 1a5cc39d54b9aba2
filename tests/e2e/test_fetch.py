"""Turn 2 elsewhere: a prefix that only another node holds comes over the wire, and only the new turn's tokens are computed.

What one engine alone answers is asked under a salt of its own, turn by turn: it splits the prompt where the held prefix
ends, as those do that take it up, so that equality is exact for the families in bfloat16 too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.managed import FAMILY, Deployment, prompt_of, running_deployment
from tests.e2e.pair import CHUNK_TOKENS, EXACT, PAIRS, held_bytes, resumes_at
from tests.support.waiting import wait_until
from tools.demo.client import get_json, prefilled_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
QUESTION_TOKENS = 505  # with its answer more than four blocks: every window that a fifth one needs is whole
OTHERS = [pytest.param(its, marks=pytest.mark.soak) for its in PAIRS if its != FAMILY]  # two engines start for each


@pytest.fixture(scope="module", params=[FAMILY, *OTHERS])
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    settings = {"bandwidth": "abundant", "fetch_tokens": 128, "rebalance_bytes_per_second": "0Gbps"}
    directory: Path = tmp_path_factory.mktemp("fetch")
    with running_deployment(
        directory, family=request.param, expiry_seconds="60s", manager_settings=settings
    ) as running:
        yield running


def _first_turn_at(deployment: Deployment, name: str, question: list[int], **more: Any) -> tuple[list[int], int]:
    """A conversation's first turn on one engine, question and answer; and how much of it its node then holds."""
    before = _sequence(deployment, name)
    answer = deployment.ask(deployment.engine_urls[name], question, **more)
    wait_until(lambda: _sequence(deployment, name) > before, what="the blocks")
    wait_until(deployment.has_healed, what="an index that knows the blocks")
    turn = [*question, *answer.token_ids]
    return turn, resumes_at(deployment.layout, len(turn) - 1)  # the last token was never computed


def _sequence(deployment: Deployment, name: str) -> int:
    reporting = get_json(f"{deployment.agents[name].status_url}/status")["reporting"]
    return int(reporting["sequence"])


def _arrived(deployment: Deployment, name: str) -> list[dict[str, Any]]:
    """What came to a node, oldest first."""
    records = get_json(f"{deployment.agents[name].status_url}/transfers")
    return [record for record in records if record["direction"] == "in"]


def _prefilled(deployment: Deployment) -> dict[str, int]:
    return {name: prefilled_tokens(url) for name, url in deployment.engine_urls.items()}


def _alone(deployment: Deployment, question: list[int], prompt: list[int]) -> tuple[int, ...]:
    """What one engine alone answers in the second turn of a conversation."""
    salt = os.urandom(8).hex()
    _first_turn_at(deployment, "west", question, cache_salt=salt)
    answer = deployment.ask(deployment.engine_urls["west"], prompt, cache_salt=salt).token_ids
    if deployment.family in EXACT:
        assert answer == deployment.reference(prompt)
    return answer


def test_what_the_prfaas_side_holds_comes_and_the_pd_side_computes_the_rest(deployment: Deployment) -> None:
    question = prompt_of(QUESTION_TOKENS, seed=1)
    turn, held = _first_turn_at(deployment, "east", question)
    arrived, computed = len(_arrived(deployment, "west")), _prefilled(deployment)
    prompt = turn + prompt_of(100, seed=2)
    answer = deployment.ask(deployment.router_url, prompt)
    assert (answer.headers["x-prfaas-route"], answer.headers["x-prfaas-reason"]) == ("local", "fetched")
    assert answer.headers["x-prfaas-cached-tokens"] == str(held)
    only_new = {"east": computed["east"], "west": computed["west"] + len(prompt) - held}
    wait_until(lambda: _prefilled(deployment) == only_new, what="the count of computed tokens")
    (copy,) = _arrived(deployment, "west")[arrived:]
    assert (copy["outcome"], copy["num_tokens"], copy["held_bytes"]) == ("completed", held, 0)
    assert copy["payload_bytes"] <= copy["wire_bytes"] <= copy["payload_bytes"] * 1.01 + 1000
    assert answer.token_ids == _alone(deployment, question, prompt)


def test_what_the_pd_side_holds_travels_there_is_extended_and_only_the_new_part_returns(
    deployment: Deployment,
) -> None:
    question = prompt_of(QUESTION_TOKENS, seed=3)
    turn, held = _first_turn_at(deployment, "west", question)
    before = {name: len(_arrived(deployment, name)) for name in ("east", "west")}
    computed = _prefilled(deployment)
    prompt = turn + prompt_of(
        2 * CHUNK_TOKENS, seed=4
    )  # after a state: whole chunks and the token that decoding computes
    answer = deployment.ask(deployment.router_url, prompt)
    assert (answer.headers["x-prfaas-route"], answer.headers["x-prfaas-reason"]) == ("remote", "long")
    assert answer.headers["x-prfaas-cached-tokens"] == str(held)
    only_new = {"east": computed["east"] + len(prompt) - 1 - held, "west": computed["west"] + 1}
    wait_until(lambda: _prefilled(deployment) == only_new, what="the count of computed tokens")
    (there,) = _arrived(deployment, "east")[before["east"] :]
    (back,) = _arrived(deployment, "west")[before["west"] :]
    assert (there["outcome"], there["num_tokens"], there["held_bytes"]) == ("completed", held, 0)
    assert (back["outcome"], back["num_tokens"]) == ("completed", len(prompt) - 1)
    assert back["held_bytes"] == held_bytes(deployment.layout, held, len(prompt) - 1), "full blocks of the prefix stay"
    missing = back["payload_bytes"] - back["held_bytes"]
    assert missing <= back["wire_bytes"] <= missing * 1.01 + 1000
    assert answer.token_ids == _alone(deployment, question, prompt)
