"""Malformed `kv_transfer_params` from a client: the engine reports a client error or computes the prompt."""

import time
from typing import Any

import pytest

from tests.support.engine_deployment import CHUNK_TOKENS, random_prompt
from tests.support.engine_pair import EnginePair, counts, outcome, post
from tests.support.waiting import wait_until
from tools.stack import EngineProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.parametrize("pair", ["granite4h"], indirect=True)]
PROMPT_TOKENS = 100


def _nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


PARAMETERS: dict[str, Any] = {
    "a grant that is a list": {"do_remote_prefill": True, "do_remote_decode": True, "prfaas_grant": _nested(100)},
    "a grant of a mebibyte": {"do_remote_prefill": True, "do_remote_decode": True, "prfaas_grant": "A" * (1 << 20)},
    "a text": "do_remote_prefill",
    "a list": ["do_remote_prefill"],
    "nothing": {},
    "directions that are texts": {"do_remote_prefill": "true", "do_remote_decode": "true", "prfaas_grant": "x"},
    "directions that are numbers": {"do_remote_prefill": 1, "do_remote_decode": 1.5, "prfaas_grant": "x"},
    "no direction": {"prfaas_grant": _nested(50)},
    "a promise that is a text": {"prfaas_promised_tokens": "all"},
    "a promise of more than there can be": {"prfaas_promised_tokens": (1 << 63) - 1},
    "a promise of more than an engine can read": {"prfaas_promised_tokens": 1 << 70},
    "a promise below zero": {"prfaas_promised_tokens": -1},
    "a promise that is no number": {"prfaas_promised_tokens": float("nan")},
    "a trace that is a list": {"prfaas_trace": _nested(10)},
    "both directions, without a grant": {"do_remote_prefill": True, "do_remote_decode": True},
    "another connector's, of wrong types": {
        "do_remote_prefill": True,
        "remote_engine_id": {},
        "remote_block_ids": "all",
        "remote_host": [None],
        "remote_port": -1e308,
        "remote_prefill_cached_tokens": -(1 << 62),
    },
    "nested as deep as JSON is read": {"x": _nested(400)},
}


def _body(pair: EnginePair, prompt: list[int], parameters: Any) -> dict[str, Any]:
    body = {"model": pair.family, "prompt": prompt, "temperature": 0, "max_tokens": 4, "ignore_eos": True}
    return body | {"return_token_ids": True, "kv_transfer_params": parameters}


@pytest.mark.parametrize("name", PARAMETERS)
def test_senseless_parameters_ask_for_no_transfer(pair: EnginePair, name: str) -> None:
    """Each engine answers right, or with a client error."""
    for engine in (pair.prefill, pair.decode):
        _assert_is_harmless(pair, engine, PARAMETERS[name])


def _assert_is_harmless(pair: EnginePair, engine: EngineProcess, parameters: Any) -> None:
    prompt = random_prompt(PROMPT_TOKENS, seed=48)
    wanted = post(engine.url, _body(pair, prompt, None))[1]["choices"][0]["token_ids"]
    status, answer, _ = post(engine.url, _body(pair, prompt, parameters))
    assert 400 <= status < 500 or answer["choices"][0]["token_ids"] == wanted, answer
    assert post(engine.url, _body(pair, prompt, parameters) | {"temperature": -1})[0] == 400


def test_both_engines_still_transfer_and_nothing_is_left(pair: EnginePair) -> None:
    """Runs after the malformed requests."""
    prompt = random_prompt(3 * CHUNK_TOKENS + 1, seed=49)
    before = counts(pair.decode).get(outcome("receive", "completed"), 0)
    assert pair.through_both(prompt) == pair.alone(prompt)
    assert counts(pair.decode)[outcome("receive", "completed")] == before + 1
    wait_until(pair.nothing_is_left)


@pytest.mark.parametrize("is_here", [False, True], ids=["under way", "here"])
def test_a_decode_leg_refused_by_the_api_releases_its_transfer(pair: EnginePair, is_here: bool) -> None:
    """The grant would end in an hour."""
    prompt = random_prompt(3 * CHUNK_TOKENS + 1, seed=50 + is_here)
    grant = pair.grant(prompt, expires_at=time.time() + 3600.0)
    before = counts(pair.decode).get(outcome("receive", "rejected"), 0)
    if is_here:
        pair.prefill_leg(prompt, grant)
        wait_until(lambda: pair.last_sent()["outcome"] == "completed")
    parameters = {"do_remote_prefill": True, "prfaas_grant": grant}
    status, answer, _ = post(pair.decode.url, _body(pair, prompt, parameters) | {"temperature": -1})
    assert (status, answer["error"]["code"]) == (400, 400)
    if not is_here:
        pair.prefill_leg(prompt, grant)
    wait_until(lambda: counts(pair.decode).get(outcome("receive", "rejected"), 0) == before + 1)
    wait_until(pair.nothing_is_left)
