"""Whatever goes wrong with a transfer, the decode engine computes the prompt itself and gives the right tokens."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from prfaas.types import AgentName
from tests.e2e.pair import CHUNK_TOKENS, Pair, counts, outcome, random_prompt
from tests.support.waiting import wait_until
from tools.demo.client import get_json

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    # Failures have nothing to do with the kind of KV: one family with states shows them.
    pytest.mark.parametrize("pair", ["granite4h"], indirect=True),
]
LENGTH = 3 * CHUNK_TOKENS + 1


def _received(pair: Pair, word: str) -> float:
    return counts(pair.decode).get(outcome("receive", word), 0)


def _status(pair: Pair) -> list[dict[str, Any]]:
    return [get_json(f"{agent.status_url}/status") for agent in (pair.east, pair.west)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"destination": AgentName("elsewhere")}, "grant_refused"),
        ({"expires_at": 1.0}, "grant_refused"),
        ({"num_tokens": 100}, "wrong_length"),
        ({"prompt_hash": bytes(16)}, "prompt_mismatch"),
        ({"tenant": "another"}, "prompt_mismatch"),
    ],
    ids=["for another node", "expired", "for another length", "for another prompt", "for another tenant"],
)
def test_a_grant_that_does_not_fit_is_no_transfer(pair: Pair, changes: dict[str, Any], reason: str) -> None:
    prompt = random_prompt(LENGTH, seed=40)
    before = _received(pair, reason)
    assert pair.decode_leg(prompt, pair.grant(prompt, **changes)) == pair.alone(prompt)
    assert _received(pair, reason) == before + 1
    wait_until(pair.nothing_is_left)


def test_a_transfer_that_never_comes_ends_at_its_deadline(pair: Pair) -> None:
    prompt = random_prompt(LENGTH, seed=41)
    before = _received(pair, "deadline")
    assert pair.decode_leg(prompt, pair.grant(prompt, expires_at=time.time() + 2.5)) == pair.alone(prompt)
    assert _received(pair, "deadline") == before + 1


def test_a_prefill_that_nobody_may_send_is_computed_all_the_same(pair: Pair) -> None:
    prompt = random_prompt(LENGTH, seed=42)
    before = counts(pair.prefill).get(outcome("send", "grant_refused"), 0)
    pair.prefill_leg(prompt, pair.grant(prompt, source=AgentName("elsewhere")))
    assert counts(pair.prefill)[outcome("send", "grant_refused")] == before + 1


def test_a_client_that_leaves_takes_its_parked_request_along(pair: Pair) -> None:
    prompt = random_prompt(LENGTH, seed=43)
    before = _received(pair, "aborted")
    body = {"model": pair.family, "prompt": prompt, "max_tokens": 4, "stream": True}
    body["kv_transfer_params"] = {"do_remote_prefill": True, "prfaas_grant": pair.grant(prompt)}
    client = http.client.HTTPConnection(pair.decode.url.removeprefix("http://"), timeout=60)
    client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    wait_until(lambda: _status(pair)[1]["receiving"] == 1)
    client.close()
    wait_until(lambda: _received(pair, "aborted") == before + 1)
    wait_until(pair.nothing_is_left)


def test_the_same_transfer_twice_is_taken_once(pair: Pair) -> None:
    prompt = random_prompt(LENGTH, seed=44)
    wanted, grant = pair.alone(prompt), pair.grant(prompt)
    pair.prefill_leg(prompt, grant)
    assert pair.decode_leg(prompt, grant) == wanted
    before = _received(pair, "cancelled")
    assert pair.decode_leg(prompt, grant) == wanted
    assert _received(pair, "cancelled") == before + 1


def test_a_parked_request_does_not_hold_up_others(pair: Pair) -> None:
    parked, other = random_prompt(LENGTH, seed=45), random_prompt(100, seed=46)
    grant = pair.grant(parked)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pair.decode_leg, parked, grant)
        wait_until(lambda: _status(pair)[1]["receiving"] == 1)
        assert pair.alone(other) and not waiting.done(), "its KV has not been asked for"
        pair.prefill_leg(parked, grant)
        assert waiting.result() == pair.alone(parked)
