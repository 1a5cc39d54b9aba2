"""Abundant bandwidth: a prefix that only the other cluster holds is fetched, and the tokens are those of one engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.managed import Deployment, prompt_of, running_deployment
from tests.waiting import wait_until
from tools.demo.client import get_json, prefilled_tokens

pytestmark = [pytest.mark.vllm]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    settings = {"bandwidth": "abundant", "fetch_tokens": 128, "rebalance_bytes_per_second": "0Gbps"}
    directory: Path = tmp_path_factory.mktemp("fetch")
    with running_deployment(directory, expiry_seconds="60s", manager_settings=settings) as running:
        yield running


def _first_turn_at(deployment: Deployment, name: str, *, seed: int) -> tuple[list[int], int]:
    """A conversation's first turn on one engine, question and answer; and how much of it its node then holds."""
    before, question = _sequence(deployment, name), prompt_of(500, seed=seed)
    answer = deployment.ask(deployment.engine_urls[name], question)
    wait_until(lambda: _sequence(deployment, name) > before, seconds=30, what="the blocks")
    wait_until(deployment.has_healed, seconds=30, what="an index that knows the blocks")
    turn = [*question, *answer.token_ids]
    return turn, len(turn) - 1  # the last token was never computed


def _sequence(deployment: Deployment, name: str) -> int:
    reporting = get_json(f"{deployment.agents[name].status_url}/status")["reporting"]
    return int(reporting["sequence"])


def _arrived(deployment: Deployment, name: str) -> list[dict[str, Any]]:
    """What came to a node, oldest first."""
    records = get_json(f"{deployment.agents[name].status_url}/transfers")
    return [its for its in records if its["direction"] == "in"]


@pytest.mark.timeout(300)
def test_what_the_prfaas_side_holds_comes_and_the_pd_side_computes_the_rest(deployment: Deployment) -> None:
    turn, held = _first_turn_at(deployment, "east", seed=1)
    arrived, computed = len(_arrived(deployment, "west")), prefilled_tokens(deployment.engine_urls["east"])
    prompt = turn + prompt_of(100, seed=2)
    answer = deployment.ask(deployment.router_url, prompt)
    assert (answer.headers["x-prfaas-route"], answer.headers["x-prfaas-reason"]) == ("local", "fetched")
    assert answer.headers["x-prfaas-cached-tokens"] == str(held)
    assert prefilled_tokens(deployment.engine_urls["east"]) == computed, "the PrfaaS side computes nothing"
    (copy,) = _arrived(deployment, "west")[arrived:]
    assert (copy["outcome"], copy["num_tokens"], copy["held_bytes"]) == ("completed", held, 0)
    assert copy["payload_bytes"] <= copy["wire_bytes"] <= copy["payload_bytes"] * 1.01 + 1000
    assert answer.token_ids == deployment.reference(prompt)


@pytest.mark.timeout(300)
def test_what_the_pd_side_holds_travels_there_is_extended_and_only_the_new_part_returns(
    deployment: Deployment,
) -> None:
    turn, held = _first_turn_at(deployment, "west", seed=3)
    before = {name: len(_arrived(deployment, name)) for name in ("east", "west")}
    computed = prefilled_tokens(deployment.engine_urls["east"])
    prompt = turn + prompt_of(400, seed=4)
    answer = deployment.ask(deployment.router_url, prompt)
    assert (answer.headers["x-prfaas-route"], answer.headers["x-prfaas-reason"]) == ("remote", "long")
    assert answer.headers["x-prfaas-cached-tokens"] == str(held)
    (there,) = _arrived(deployment, "east")[before["east"] :]
    (back,) = _arrived(deployment, "west")[before["west"] :]
    assert (there["outcome"], there["num_tokens"], there["held_bytes"]) == ("completed", held, 0)
    assert (back["outcome"], back["num_tokens"]) == ("completed", len(prompt) - 1)
    last_block = there["attention_bytes"] - back["held_bytes"]  # partial there, full in the longer prompt
    assert last_block > 0 and there["attention_bytes"] % last_block == 0, "all full blocks of the prefix stay"
    missing = back["payload_bytes"] - back["held_bytes"]
    assert missing <= back["wire_bytes"] <= missing * 1.01 + 1000
    assert prefilled_tokens(deployment.engine_urls["east"]) - computed == len(prompt) - 1 - held
    assert answer.token_ids == deployment.reference(prompt)
