"""Speculative decoding with drafts of several kinds, on the decode engine or on both."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.engine_deployment import CHUNK_TOKENS
from tests.support.engine_pair import EnginePair, num_outcomes, running_pair
from tools.tiny_models import make_eagle, make_model

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(1800)]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
NUM_LIVES = 25  # In each part; `-k ngram-3` runs one part of both n-gram situations.
MAX_PARTS = 8
NUM_AT_ONCE = 5
ACCEPTED, DRAFTED = "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"


@dataclass(frozen=True)
class Situation:
    """Engines that speculate. `model` is a draft model of random weights, or the target itself, which is always right."""

    drafts: dict[str, Any]
    model: str = ""
    on_prefill: bool = True
    draft_kv: bool = True
    num_parts: int = 1


OWN = {"method": "draft_model", "num_speculative_tokens": 3}
SITUATIONS = {
    "decode ngram": Situation(NGRAM, on_prefill=False, num_parts=4),
    "both ngram": Situation(NGRAM, num_parts=MAX_PARTS),
    "both draft_model": Situation(OWN, model="target"),
    "decode draft_model": Situation(OWN, model="target", on_prefill=False, draft_kv=False),
    "both eagle": Situation({"method": "eagle", "num_speculative_tokens": 3}, model="eagle"),
}


@pytest.fixture(scope="module", params=SITUATIONS)
def speculating(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePair]:
    chosen, directory = SITUATIONS[request.param], tmp_path_factory.mktemp("speculation")
    drafts = dict(chosen.drafts)
    if chosen.model:
        target = make_model("llama", directory / "llama")
        drafts["model"] = str(target if chosen.model == "target" else make_eagle(target, directory / "eagle"))
    flags: dict[str, Any] = {
        "extra" if chosen.on_prefill else "decode_extra": ("--speculative-config", json.dumps(drafts))
    }
    with running_pair("llama", directory, connector={"draft_kv": chosen.draft_kv}, **flags) as running:
        yield running


def _prompt(source: random.Random) -> list[int]:
    """Return a prompt that repeats itself, so that its n-grams give drafts."""
    phrase = [source.randrange(3, 200) for _ in range(source.randrange(2, 12))]
    return (phrase * 300)[: source.randrange(2, 3 * CHUNK_TOKENS)]


@pytest.mark.parametrize("part", range(MAX_PARTS))
def test_tokens_equal_those_of_one_engine_in_many_lives(
    speculating: EnginePair, request: pytest.FixtureRequest, part: int, record_property: Callable[[str, object], None]
) -> None:
    """Later turns take up what earlier answers, some of them ended inside a draft, left in the pool."""
    situation = request.node.callspec.params["speculating"]
    if part >= SITUATIONS[situation].num_parts:
        pytest.skip("this situation has fewer parts")
    source, prompts, num_lives = random.Random(part), [[5, 6, 7 + part] * 40], 0
    before = num_outcomes(speculating.decode, "receive", "completed")
    while num_lives < NUM_LIVES:
        chosen = [source.choice(prompts) if source.random() < 0.4 else _prompt(source) for _ in range(NUM_AT_ONCE)]
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            answers = list(pool.map(speculating.through_both, chosen))
            expected = list(pool.map(speculating.alone, chosen))
        for prompt, answer, alone in zip(chosen, answers, expected, strict=True):
            is_equal = answer == alone or speculating.differ_by_near_tie(prompt, answer, alone)
            assert is_equal, (num_lives, len(prompt), answer, alone)
            prompts.append([*prompt, *answer, source.randrange(3, 200)][: 6 * CHUNK_TOKENS])
            num_lives += 1
    assert num_outcomes(speculating.decode, "receive", "completed") > before + NUM_LIVES // 2
    accepted, drafted = _total(speculating, ACCEPTED), _total(speculating, DRAFTED)
    record_property(f"accepted share of drafts, {situation}", round(accepted / drafted, 3))
    if "draft_model" in situation:
        # The target drafts what it answers, unless its KV of the prompt did not come.
        assert (accepted > 0.9 * drafted) == SITUATIONS[situation].draft_kv
    elif "ngram" in situation:
        assert 0 < accepted < drafted, "some drafts are rejected"


def _total(pair: EnginePair, name: str) -> float:
    """Return a counter of the decode engine."""
    with urllib.request.urlopen(f"{pair.decode.url}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))
