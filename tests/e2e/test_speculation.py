"""Speculative decoding with n-grams: drafts without KV of their own, on the decode engine or on both."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator

import pytest

from tests.support.engine_deployment import CHUNK_TOKENS
from tests.support.engine_pair import EnginePair, num_outcomes, running_pair

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(1800)]
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
FLAGS = ("--speculative-config", json.dumps(SPECULATION))
NUM_PARTS, LIVES_PER_PART = 8, 25  # `-k both-3` runs one part.
ACCEPTED, DRAFTED = "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"


@pytest.fixture(scope="module", params=["decode", "both"])
def speculating(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePair]:
    flags = {"decode_extra" if request.param == "decode" else "extra": FLAGS}
    with running_pair("llama", tmp_path_factory.mktemp("speculation"), **flags) as running:  # type: ignore[arg-type]
        yield running


def _prompt(source: random.Random) -> list[int]:
    """Return a prompt that repeats itself, so that its n-grams give drafts."""
    phrase = [source.randrange(3, 200) for _ in range(source.randrange(2, 12))]
    return (phrase * 300)[: source.randrange(2, 3 * CHUNK_TOKENS)]


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_tokens_equal_those_of_one_engine_in_many_lives(speculating: EnginePair, part: int) -> None:
    """Later turns take up what earlier answers, some of them ended inside a draft, left in the pool."""
    source, prompts = random.Random(part), [[5, 6, 7 + part] * 40]
    before = num_outcomes(speculating.decode, "receive", "completed")
    for life in range(LIVES_PER_PART):
        is_turn = source.random() < 0.4
        prompt = source.choice(prompts) if is_turn else _prompt(source)
        answer = speculating.through_both(prompt)
        assert answer == speculating.alone(prompt), life
        prompts.append([*prompt, *answer, source.randrange(3, 200)][: 6 * CHUNK_TOKENS])
    assert num_outcomes(speculating.decode, "receive", "completed") > before + LIVES_PER_PART // 2
    assert 0 < _total(speculating, ACCEPTED) < _total(speculating, DRAFTED), "some drafts are rejected"


def _total(pair: EnginePair, name: str) -> float:
    """Return a counter of the decode engine."""
    with urllib.request.urlopen(f"{pair.decode.url}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))
