"""Failed transfers: the decode engine computes the prompt itself, with the right tokens, or fails if vLLM is told to."""

import http.client
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from prfaas import grants
from prfaas.transfer_report import ReceivedReport, received_report, take_comment
from prfaas.types import AgentName, TransferOutcome
from tests.support.engine_deployment import CHUNK_TOKENS, random_prompt
from tests.support.engine_pair import EnginePair, num_outcomes, parameters
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
LENGTH = 3 * CHUNK_TOKENS + 1
# Failures do not depend on the kind of KV, so a family with states stands for all.
with_states = pytest.mark.parametrize("pair", ["granite4h"], indirect=True)


def _num_received(pair: EnginePair, word: str) -> int:
    return num_outcomes(pair.decode, "receive", word)


@with_states
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"destination": AgentName("elsewhere")}, "grant_refused"),
        ({"num_tokens": (1 << 63) - 1}, "wrong_length"),
        ({"tenant": "another"}, "prompt_mismatch"),
    ],
    ids=["for another node", "for another length", "for another tenant"],
)
def test_a_wrong_grant_costs_a_counted_recompute(pair: EnginePair, changes: dict[str, Any], reason: str) -> None:
    prompt = random_prompt(LENGTH, seed=40)
    before = _num_received(pair, reason)
    assert pair.decode_leg(prompt, pair.grant(prompt, **changes)) == pair.alone(prompt)
    assert _num_received(pair, reason) == before + 1
    wait_until(pair.nothing_is_left)


@with_states
def test_a_transfer_that_never_comes_ends_at_its_deadline(pair: EnginePair) -> None:
    prompt = random_prompt(LENGTH, seed=41)
    before = _num_received(pair, "deadline")
    assert pair.decode_leg(prompt, pair.grant(prompt, expires_at=time.time() + 2.5)) == pair.alone(prompt)
    assert _num_received(pair, "deadline") == before + 1


@with_states
def test_a_refused_send_does_not_stop_the_prefill(pair: EnginePair) -> None:
    prompt = random_prompt(LENGTH, seed=42)
    before = num_outcomes(pair.prefill, "send", "grant_refused")
    pair.prefill_leg(prompt, pair.grant(prompt, source=AgentName("elsewhere")))
    assert num_outcomes(pair.prefill, "send", "grant_refused") == before + 1


@with_states
def test_a_leaving_client_ends_its_parked_request(pair: EnginePair) -> None:
    prompt = random_prompt(LENGTH, seed=43)
    before = _num_received(pair, "aborted")
    body = {"model": pair.family, "prompt": prompt, "max_tokens": 4, "stream": True}
    body["kv_transfer_params"] = parameters("do_remote_prefill", pair.grant(prompt))
    client = http.client.HTTPConnection(pair.decode.url.removeprefix("http://"), timeout=60)
    client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    wait_until(lambda: pair.agent_status("west")["receiving"] == 1)
    client.close()
    wait_until(lambda: _num_received(pair, "aborted") == before + 1)
    wait_until(pair.nothing_is_left)


@with_states
@pytest.mark.parametrize("stream", [False, True])
def test_the_response_of_a_decode_leg_reports_the_outcome(pair: EnginePair, stream: bool) -> None:
    prompt = random_prompt(LENGTH, seed=47 + stream)
    wrong = pair.grant(prompt, tenant="another")
    cases: list[tuple[str, TransferOutcome, int]] = [
        (wrong, "prompt_mismatch", 0),
        (pair.grant(prompt), "completed", LENGTH - 1),
    ]
    for grant, outcome, num_tokens in cases:
        with ThreadPoolExecutor(1) as pool:
            decoding = pool.submit(_report, pair, prompt, grant, stream=stream)
            if outcome == "completed":
                pair.prefill_leg(prompt, grant)
            transfer_id = grants.unverified(grants.from_text(grant)).transfer_id.hex()
            assert decoding.result() == ReceivedReport(transfer_id, outcome, num_tokens)


def _report(pair: EnginePair, prompt: list[int], grant: str, *, stream: bool) -> ReceivedReport | None:
    """Return the report in the response to a decode leg."""
    body = {"model": pair.family, "prompt": prompt, "max_tokens": 2, "stream": stream}
    body |= {"kv_transfer_params": parameters("do_remote_prefill", grant)}
    request = urllib.request.Request(f"{pair.decode.url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as response:
        raw = response.read()
    return take_comment(raw)[1] if stream else received_report(json.loads(raw)["kv_transfer_params"])
